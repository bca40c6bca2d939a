"""What passes cost, kept from one start of a model to the next.

A file in the folder `costs` of the cache folder (`paceline.cache_folder`) has the fastest pass of each row count,
for weights of one shape, on one kind of CPU, with one number of threads. It is written while the model serves, every
few minutes, and when the process ends. A file that cannot be read or written is no error: three passes replace it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch

from paceline.cache_folder import cache_folder
from paceline.core.policy.step_cost import LearnedRowCost, RowCost
from paceline.model.model import Model, TransformersModel
from paceline.model.native.build import NativeUnavailableError, native_description
from paceline.model.numerics import cpu_name
from paceline.model.row_probe import Measurable, measure_row_cost, quick_row_cost
from paceline.telemetry.logs import load_phase

WRITE_INTERVAL_S = 180.0
SECONDS_DIGITS = 4


class KeptRowCost(LearnedRowCost):
    """Writes its points to a file, in a thread of its own: no step waits for a disk."""

    def __init__(self, points: Mapping[int, float], file: Path) -> None:
        super().__init__(points)
        self._file = file
        self._written_at = time.monotonic()
        weakref.finalize(self, _write, file, self.points)  # also when the process ends

    def observe(self, rows: int, seconds: float) -> None:
        super().observe(rows, seconds)
        if (now := time.monotonic()) - self._written_at > WRITE_INTERVAL_S:
            self._written_at = now
            threading.Thread(target=_write, args=(self._file, dict(self.points)), daemon=True).start()


def model_row_cost(model: Model, most: int, threads: int) -> RowCost:
    """The cost of a model's passes. One without weights is measured in full: there is nothing to know it by."""
    if not isinstance(model, TransformersModel):
        return measure_row_cost(model, most)
    facts = (model.numerics, model.layers, model.vocabulary_size, weight_bytes(model.folder))
    return kept_row_cost(model, most, threads, facts, model.device)


def kept_row_cost(model: Measurable, most: int, threads: int, facts: Sequence[object], device: torch.device) -> RowCost:
    """The cost that an earlier process learned, else of three passes; learned further while serving.

    `facts`: what tells these weights from those of another shape. On an accelerator passes are measured in full at each
    start: they are short, and the first of each size compiles its kernels.
    """
    if device.type != "cpu":
        with load_phase("pass costs measured"):
            return LearnedRowCost(measure_row_cost(model, most).points)
    try:
        file = cache_folder("costs") / f"{_digest((*facts, threads, cpu_name(), _native()))}.json"
    except (OSError, RuntimeError):
        return quick_row_cost(model, most)
    if (points := _read(file)) is None:
        with load_phase("pass costs estimated"):
            points = quick_row_cost(model, most).points
    return KeptRowCost(points, file)


def weight_bytes(path: Path) -> int:
    """The size of the weights in a file, or in the files of a folder."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _native() -> str:
    try:
        return native_description()
    except NativeUnavailableError:
        return ""


def _digest(facts: Sequence[object]) -> str:
    return blake2b(repr(facts).encode(), digest_size=12).hexdigest()


def _read(file: Path) -> dict[int, float] | None:
    """None if there is no such file, or another user's, or nonsense."""
    try:
        if file.stat().st_uid != os.geteuid():
            return None
        points = {int(rows): float(seconds) for rows, seconds in json.loads(file.read_text(encoding="utf-8")).items()}
        LearnedRowCost(points)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return points if math.isfinite(sum(points.values())) else None


def _write(file: Path, points: Mapping[int, float]) -> None:
    """The file appears complete or not at all."""
    text = json.dumps({rows: float(f"{seconds:.{SECONDS_DIGITS}g}") for rows, seconds in sorted(points.items())})
    with suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix="writing-", delete=False) as written:
            written.write(text)
        Path(written.name).replace(file)
