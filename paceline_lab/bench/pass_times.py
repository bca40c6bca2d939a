"""`paceline bench passes`: how long the target's passes take, by their number of rows.

Rows are chains of guesses after a context of a tile or two, as a worker measures them at its start
(`paceline.model.row_probe`). Environment variables choose what computes: PACELINE_NATIVE=0, PACELINE_ATTENTION,
PACELINE_CUDA_GRAPHS=0.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline import family
from paceline.config import EngineConfig
from paceline.model.model_loader import load
from paceline.model.row_probe import ROW_COUNTS, measure_row_cost
from paceline_lab.bench import random_checkpoint
from paceline_lab.bench.bench_measurement import check_names
from paceline_lab.training.family.widened_family import widened_family

SHIPPED, WIDENED, RANDOM = SIZES = ("shipped", "widened", "random 8B")
"""Of the target. The last has the shape of Llama 3.1 8B and random weights."""
MOST = 64


def run(console: Console, device: str, sizes: Collection[str]) -> dict[str, Any]:
    """Measure and show; return the JSON document. Raises `StartError` for an unknown size."""
    check_names(sizes, SIZES)
    found: dict[str, dict[str, Any]] = {}
    for size in sizes:
        with TemporaryDirectory() as folder:
            path = _checkpoint(size, Path(folder), device)
            weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            model = load(str(path), EngineConfig(device=device, slots=4096, threads=os.cpu_count() or 1))
        cost = measure_row_cost(model, MOST)
        found[size] = {
            "numerics": model.numerics,
            "weight_bytes": weight_bytes,
            "ms": {rows: round(1e3 * cost(rows), 3) for rows in ROW_COUNTS if rows <= MOST},
        }
    table = Table("rows", *found)
    for rows in next(iter(found.values()))["ms"]:
        table.add_row(str(rows), *(f"{each['ms'][rows]:.3f} ms" for each in found.values()))
    console.print(table)
    return {"device": device, "passes": found}


def _checkpoint(size: str, folder: Path, device: str) -> Path:
    if size == SHIPPED:
        return family.path(family.NAMES[0])
    return widened_family(folder)[0] if size == WIDENED else random_checkpoint.write(folder, device)
