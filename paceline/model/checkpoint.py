"""A checkpoint as named tensors: a folder with safetensors or torch's format, in one file or many, or a GGUF file.

Tensors are read when they are requested, in the requested dtype and on the requested device. A fault of a checkpoint is
a `CheckpointError` with one sentence.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.gguf.gguf_file import GgufError, is_gguf
from paceline.model.gguf_weights import GgufWeights
from paceline.model_names import BrokenFileError, json_object

SAFETENSORS = (".safetensors",)
TORCH = (".bin", ".pt", ".pth")
TRAINING_STATE_PREFIXES = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
"""Prefixes of files that trainers write next to the weights; their suffixes look like weights."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the text says why, and what to do."""


class BrokenCheckpointError(CheckpointError, BrokenFileError):
    """A file of the checkpoint cannot be read, or contradicts another one."""


class Checkpoint:
    """Reads one folder, or a GGUF file, whose tensors have transformers' names and are dequantised."""

    def __init__(self, folder: Path | str) -> None:
        """`folder`: or a GGUF file. Raises `CheckpointError` if there is none."""
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir() and not (is_gguf(self.folder) and self.folder.is_file()):
            raise CheckpointError(f"no checkpoint at {self.folder}: it has to be a folder with config.json and weights")

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json; empty if there is none. Raises `CheckpointError` if it is not a JSON object."""
        if is_gguf(self.folder):
            return self._gguf.config
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        try:
            return json_object(path)
        except BrokenFileError as error:
            raise BrokenCheckpointError(str(error)) from error

    @cached_property
    def names(self) -> Sequence[str]:
        """Names of all tensors. Raises `CheckpointError` if a file cannot be read, or there are no tensors."""
        return list(self._files)

    def find(self, ending: str) -> str | None:
        """The shortest name that equals `ending` or ends in a dot and `ending`; None if there is none."""
        found = [name for name in self.names if name == ending or name.endswith(f".{ending}")]
        return min(found, key=len, default=None)

    def find_required(self, ending: str) -> str:
        """As `find`. Raises `CheckpointError` if there is no such tensor."""
        name = self.find(ending)
        if name is None:
            raise CheckpointError(f"{self} has no tensor {ending}: it is incomplete, or no checkpoint of this kind")
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, read from the header where the format has one."""
        return self._file(name).shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read a tensor; a floating-point one in `dtype`. None: the stored dtype."""
        tensor = self._file(name).tensor(name, dtype)
        return tensor.to(device=device, dtype=dtype if dtype is not None and tensor.is_floating_point() else None)

    def _file(self, name: str) -> _WeightFile:
        if name not in self._files:
            raise CheckpointError(f"{self} has no tensor {name}: it is incomplete, or no checkpoint of this kind")
        return self._files[name]

    @cached_property
    def _files(self) -> Mapping[str, _WeightFile]:
        """The file of each tensor."""
        if is_gguf(self.folder):
            return dict.fromkeys(self._gguf.names, self._gguf)
        for endings, kind in ((SAFETENSORS, _SafetensorsFile), (TORCH, _TorchFile)):
            paths = sorted(path for path in self.folder.iterdir() if path.suffix in endings and _holds_weights(path))
            files: dict[str, _WeightFile] = {
                name: file for path in paths for file in [kind(path)] for name in file.names
            }
            if files:
                return files
        raise CheckpointError(f"{self} holds no weights: neither *.safetensors nor *.bin nor *.pt")

    @cached_property
    def _gguf(self) -> GgufWeights:
        try:
            return GgufWeights(self.folder)
        except GgufError as error:
            raise CheckpointError(str(error)) from error


class _WeightFile(Protocol):
    """One file with tensors, or all parts of a GGUF file."""

    @property
    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """`dtype`: a file that converts anyway returns this one."""


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            sizes = _sizes(path)
            fault = f"{path} cannot be read ({first_sentence(error)}{sizes}): download it again"
            raise BrokenCheckpointError(fault) from error
        self.names = list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _TorchFile:
    """Unpickles tensors only: an untrusted file must not run code. Other values are ignored."""

    def __init__(self, path: Path) -> None:
        try:
            # Files from before torch 1.6 are not zip archives and cannot be mapped.
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
            fault = f"{path} cannot be read ({first_sentence(error)}): download it again"
            raise BrokenCheckpointError(fault) from error
        values = stored if isinstance(stored, dict) else {}
        self._tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        return self._tensors[name]


def _sizes(path: Path) -> str:
    """Of a safetensors file that was cut off, and of what its header lists."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, path.stat().st_size)))
        whole = 8 + length + max(each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ""
    return f"; it has {path.stat().st_size} bytes, and its header lists {whole}"


def check_files(folder: Path) -> None:
    """Find the file of a folder that cannot be read. Raises `BrokenFileError`."""
    indexed = ".safetensors" if any(folder.glob("*.safetensors")) else ""  # others may be left over
    indexes = folder.glob(f"*{indexed}.index.json")
    for path in (folder / "config.json", folder / "generation_config.json", *indexes):
        content = json_object(path) if path.is_file() else {}
        if not path.name.endswith(".index.json"):
            continue
        files = content.get("weight_map")
        if not isinstance(files, dict):
            raise BrokenCheckpointError(f"{path} has no weight_map: download it again")
        if lacking := sorted({str(each) for each in files.values() if not (folder / str(each)).is_file()}):
            raise BrokenCheckpointError(f"{path} names {lacking[0]}, which is not there: download it")
    for path in folder.glob("*.safetensors"):
        _SafetensorsFile(path)


def check_sizes(checkpoint: Path, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """`mismatched`: names of tensors, and both shapes. Raises `BrokenCheckpointError` if there is one."""
    for name, stored, wanted in sorted(mismatched):
        shapes = f"{list(stored)}, and its configuration asks for {list(wanted)}"
        raise BrokenCheckpointError(f"{checkpoint}: the tensor {name} is {shapes}: one of the two is another model's")


def _holds_weights(path: Path) -> bool:
    return not path.name.startswith(TRAINING_STATE_PREFIXES)


def first_sentence(error: Exception) -> str:
    """The first sentence of a library's message, without terminal colours."""
    text = re.sub(r"\x1b\[\d*m", "", " ".join(str(error).split()))
    return re.split(r"(?<=\w)\. ", text)[0].removesuffix(".") or type(error).__name__
