"""What this machine does: whether rows are independent of their company, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from paceline.core.policy.step_cost import RowCost
from paceline.model.model import Model
from paceline.model.rows import TILE, Row, SlotTable

PROBE_CONTEXT = 2 * TILE - 5
"""Committed positions of the probe: two tiles, the second of which is about to fill."""
PROBE_DEPTH = 8
"""Depth of the chains of guesses that `measure_row_cost` measures."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64, 96, 128, 192, 256)


def is_row_invariant(model: Model) -> bool:
    """Whether a path gives the same logits, bit for bit, token by token and as a branch of a bushy tree.

    Slots are scattered, the path crosses a tile border, and every node of it has decoys beside it.
    """
    length = max(1, min(PROBE_CONTEXT, model.max_model_len - 16, model.slots // 4))
    tokens = [(7 * i + 3) % model.vocabulary_size for i in range(length + 8)]
    slots = iter(range(model.slots, 0, -1))
    alone = _one_by_one(model, tokens, slots)[length:]
    lane = SlotTable()
    lane.slots = [next(slots) for _ in range(length)]
    model.run([lane.row(token, i) for i, token in enumerate(tokens[:length])], [])
    rows: list[Row] = []
    wanted: list[int] = []
    branch: list[int] = []
    for token in tokens[length:]:
        rows.append(lane.branch_row((token + 1) % model.vocabulary_size, [*branch, next(slots)]))
        branch.append(next(slots))
        wanted.append(len(rows))
        rows.append(lane.branch_row(token, branch))
    together = model.run(rows, wanted).logits
    return all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def _one_by_one(model: Model, tokens: Sequence[int], slots: Iterator[int]) -> list[torch.Tensor]:
    lane = SlotTable()
    logits = []
    for i, token in enumerate(tokens):
        lane.slots.append(next(slots))
        logits.append(model.run([lane.row(token, i)], [0]).logits[0])
    return logits


class Runs(Protocol):
    """What takes the time."""

    slots: int

    max_model_len: int

    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> object: ...


def measure_row_cost(model: Runs, most: int, repeats: int = 5) -> RowCost:
    """Measure seconds per pass for 1, 2, ... `most` rows, chains of guesses on top of a context of a tile or two.

    Some paths pad rows to multiples of eight, so that the ninth costs as much as the sixteenth.
    """
    lane = SlotTable()
    context = min(PROBE_CONTEXT, model.max_model_len // 2, model.slots // 4)
    lane.slots = list(range(1, context + 1))
    model.run([lane.row(0, i) for i in range(context)], [])
    counts = [n for n in ROW_COUNTS if n <= min(most, model.slots // 4)]
    guesses = [
        lane.branch_row(0, range(context + 1 + i - i % PROBE_DEPTH, context + 2 + i)) for i in range(max(counts))
    ]
    # In turns, and the fastest of each: what else runs on this machine then hardly bends the curve. The longest first:
    # a long pass drives the weights out of the caches, and it takes several short ones to bring them back.
    rounds = [[_timed(model, guesses[:count]) for count in reversed(counts)] for _ in range(repeats)]
    return RowCost(counts, [min(times) for times in zip(*rounds, strict=True)][::-1])


def _timed(model: Runs, rows: Sequence[Row]) -> float:
    _finish_all()
    start = time.perf_counter()
    model.run(rows, range(len(rows)))
    _finish_all()
    return time.perf_counter() - start


def _finish_all() -> None:
    """An accelerator works on while Python goes ahead."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
