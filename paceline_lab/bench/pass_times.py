"""`paceline bench passes`: how long the target's passes take, by their number of rows.

Rows are chains of guesses after a context of a tile or two, or of a given length (`paceline.model.row_probe`).
Environment variables choose what computes: PACELINE_NATIVE=0, PACELINE_ATTENTION, PACELINE_CUDA_GRAPHS=0.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline import family
from paceline.config import EngineConfig
from paceline.launcher import StartError
from paceline.model import Model, limit_torch_threads, load
from paceline.model.row_probe import PROBE_CONTEXT, ROW_COUNTS, is_row_invariant, measure_row_cost
from paceline.model_names import ModelNotFoundError, resolve_model
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, QWEN_0_8B, Shape
from paceline_lab.bench.gpu.random_models import build_model, make_network, weight_bytes
from paceline_lab.training.family.widened_family import widened_family

SHIPPED, WIDENED = "shipped", "widened"
RANDOM: dict[str, tuple[Shape, torch.dtype]] = {
    "random 8B": (LLAMA_8B, torch.bfloat16),
    "random Qwen3.5-0.8B": (QWEN_0_8B, torch.bfloat16),
    "random Qwen3.5-0.8B float32": (QWEN_0_8B, torch.float32),
}
"""Targets with random weights."""
SIZES = (SHIPPED, WIDENED, *RANDOM)
"""Of the target. Any other name is a model's."""
MOST = 64


def run(console: Console, device: str, sizes: Collection[str], context: int | None = None) -> dict[str, Any]:
    """Measure and show; return the JSON document. `context`: positions before the rows; None: a tile or two.

    Raises `StartError` for a name that is neither a size nor a model.
    """
    found: dict[str, dict[str, Any]] = {}
    context = context or PROBE_CONTEXT
    for size in sizes:
        with TemporaryDirectory() as folder:
            engine = EngineConfig(device=device, slots=max(4096, 4 * context), threads=os.cpu_count() or 1)
            torch.set_num_threads(engine.threads)
            model, size_bytes = _model(size, Path(folder), engine)
        limit_torch_threads(model)
        cost = measure_row_cost(model, MOST, context=context)
        found[size] = {
            "numerics": model.numerics,
            "rows_invariant": model.rows_invariant,
            "weight_bytes": size_bytes,
            "ms": {rows: round(1e3 * cost(rows), 3) for rows in ROW_COUNTS if rows <= MOST},
        }
    table = Table("rows", *found)
    for rows in next(iter(found.values()))["ms"]:
        table.add_row(str(rows), *(f"{each['ms'][rows]:.3f} ms" for each in found.values()))
    invariant = ("yes" if each["rows_invariant"] else "no" for each in found.values())
    table.add_row("rows invariant", *invariant)
    console.print(table)
    return {"device": device, "context": context, "passes": found}


def _model(size: str, folder: Path, engine: EngineConfig) -> tuple[Model, int]:
    """The model, and the bytes of its weights."""
    if size in RANDOM:
        shape, dtype = RANDOM[size]
        network = make_network(shape, torch.device(engine.device), dtype)
        size_bytes = weight_bytes(network)
        model = build_model(network, engine)
        model.rows_invariant = is_row_invariant(model)
        return model, size_bytes
    path = _checkpoint(size, folder)
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return load(str(path), engine), sum(file.stat().st_size for file in files)


def _checkpoint(size: str, folder: Path) -> Path:
    if size == SHIPPED:
        return family.path(family.NAMES[0])
    if size == WIDENED:
        return widened_family(folder)[0]
    try:
        return Path(resolve_model(size))
    except ModelNotFoundError as error:
        raise StartError(f"{size} is none of {', '.join(SIZES)}; {error}") from error
