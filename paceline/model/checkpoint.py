"""A checkpoint as a folder of named tensors: safetensors or torch's own format, in one file or many.

Nothing is built from it here, and nothing is read before it is asked for. A tensor comes in the dtype and on the device
that it is wanted in. What is wrong with a checkpoint is said in one sentence (`CheckpointError`).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SAFETENSORS = (".safetensors",)
TORCH = (".bin", ".pt", ".pth")
TRAINING_STATE_PREFIXES = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
"""What files that trainers leave beside the weights begin with; they look like weights, and hold none."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the text says why, and what would work."""


class Checkpoint:
    """Reads one folder."""

    def __init__(self, folder: Path | str) -> None:
        """Raises `CheckpointError` if there is no such folder."""
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise CheckpointError(f"no checkpoint at {self.folder}: it has to be a folder with config.json and weights")

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What config.json says; empty without one."""
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} is no JSON ({error}): download it again") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} holds no JSON object: download it again")
        return config

    @cached_property
    def names(self) -> Sequence[str]:
        """Of all tensors. Raises `CheckpointError` if a file cannot be read, or there are none."""
        return list(self._shelves)

    def find(self, ending: str) -> str | None:
        """The shortest name that is this or ends in a dot and this."""
        found = [name for name in self.names if name == ending or name.endswith(f".{ending}")]
        return min(found, key=len, default=None)

    def find_required(self, ending: str) -> str:
        """The same; raises `CheckpointError` if there is none."""
        name = self.find(ending)
        if name is None:
            raise CheckpointError(f"{self} has no tensor {ending}: it is incomplete, or no checkpoint of this kind")
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor, where the format allows."""
        shelf = self._shelf(name)
        return shelf.shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The tensor of this name; floating-point ones in `dtype`, None: as they are stored."""
        tensor = self._shelf(name).tensor(name)
        return tensor.to(device=device, dtype=dtype if dtype is not None and tensor.is_floating_point() else None)

    def _shelf(self, name: str) -> _WeightFile:
        if name not in self._shelves:
            raise CheckpointError(f"{self} has no tensor {name}: it is incomplete, or no checkpoint of this kind")
        return self._shelves[name]

    @cached_property
    def _shelves(self) -> Mapping[str, _WeightFile]:
        """By tensor, the file that holds it."""
        for endings, kind in ((SAFETENSORS, _SafetensorsFile), (TORCH, _TorchFile)):
            files = sorted(path for path in self.folder.iterdir() if path.suffix in endings and _holds_weights(path))
            shelves = {name: shelf for path in files for shelf in [kind(path)] for name in shelf.names}
            if shelves:
                return shelves
        raise CheckpointError(f"{self} holds no weights: neither *.safetensors nor *.bin nor *.pt")


class _WeightFile:
    """One file with tensors."""

    names: Sequence[str]

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        raise NotImplementedError


class _SafetensorsFile(_WeightFile):
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({first_sentence(error)}): download it again") from error
        self.names = list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _TorchFile(_WeightFile):
    """Only tensors are unpickled: a file from a stranger must not run code. Other values are passed over."""

    def __init__(self, path: Path) -> None:
        try:
            # Files from before torch 1.6 are no archives, and cannot be mapped.
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({first_sentence(error)}): download it again") from error
        values = stored if isinstance(stored, dict) else {}
        self._tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _holds_weights(path: Path) -> bool:
    return not path.name.startswith(TRAINING_STATE_PREFIXES)


def first_sentence(error: Exception) -> str:
    """Of what a library says at length; without what would colour a screen."""
    said = re.sub(r"\x1b\[\d*m", "", " ".join(str(error).split()))
    return re.split(r"(?<=\w)\. ", said)[0].removesuffix(".") or type(error).__name__
