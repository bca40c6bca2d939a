"""Whether a row's logits depend on how many rows a pass has.

The same path again and again: one row a pass, eight, and every number of rows in use. `other_bits` has, by rows of a
pass, how many of them have other logits than alone; a model whose rows are invariant has no entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline import family
from paceline.config import EngineConfig
from paceline.model import Model, load
from paceline.model.rows import Row, SlotTable
from paceline_lab.bench.gpu.micro import ROWS
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, shape_for
from paceline_lab.bench.gpu.random_models import build_model, make_network

CONTEXT = 120
"""Positions before the path: it crosses borders of tiles."""
COUNTS = (9, 17, 40, 56, 65, *ROWS)
"""Rows of a pass: those of graphs, and others, which are padded."""


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    engine = EngineConfig(device=str(device), slots=2048)
    yield {"8B": row_bits(build_model(make_network(shape_for(LLAMA_8B, device), device), engine))}
    model = load(family.NAMES[0], engine)
    yield {"shipped": {"rows_invariant": model.rows_invariant, **row_bits(model)}}


def row_bits(model: Model) -> dict[str, Any]:
    """Other bits by rows of a pass."""
    table = SlotTable(range(1, CONTEXT + ROWS[-1] + 1))
    rows = [table.row((7 * i + 3) % model.vocabulary_size, i) for i in range(len(table))]
    model.run(rows[:CONTEXT], [])
    path = rows[CONTEXT:]
    alone = torch.cat([_logits(model, [row]) for row in path])
    by_eights = torch.cat([_logits(model, path[i : i + 8]) for i in range(0, len(path), 8)])
    found = {"in eights": _differ(alone, by_eights)}
    found |= {str(count): _differ(alone, _logits(model, path[:count])) for count in sorted(COUNTS)}
    return {"numerics": model.numerics, "other_bits": {name: count for name, count in found.items() if count}}


def _logits(model: Model, rows: list[Row]) -> Tensor:
    """A copy: the output of a graph is overwritten."""
    return model.run(rows, range(len(rows))).logits.clone()


def _differ(alone: Tensor, together: Tensor) -> int:
    return int((alone[: len(together)] != together).any(-1).sum())
