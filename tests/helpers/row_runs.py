"""Runs of one sequence that all have to give the same logits: one row at a time, trees, chunks, beside others."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from paceline.model.model import Model
from paceline.model.rows import Row, SlotTable


def one_by_one(model: Model, sequence: list[int]) -> list[torch.Tensor]:
    table = SlotTable(range(1, len(sequence) + 1))
    return [model.run([table.row(token, position)], [0]).logits[0] for position, token in enumerate(sequence)]


def random_trees(
    model: Model,
    sequence: list[int],
    make: Callable[[SlotTable, int, list[int]], Row] = SlotTable.branch_row,
) -> list[torch.Tensor]:
    """Run `sequence` in steps: each verifies a part of it as a path among decoys, then commits the path."""
    rng = random.Random(3)
    table, logits, free = SlotTable(), [], list(range(1000, 0, -1))
    while len(logits) < len(sequence):
        depth = min(rng.randint(1, 6), len(sequence) - len(logits))
        rows, wanted, path, decoys = [], [], [], []
        for token in sequence[len(logits) : len(logits) + depth]:
            for _ in range(rng.randint(0, 2)):
                decoys.append(free.pop())
                rows.append(make(table, rng.randrange(model.vocabulary_size), [*path, decoys[-1]]))
            path.append(free.pop())
            wanted.append(len(rows))
            rows.append(make(table, token, path.copy()))
        logits += model.run(rows, wanted).logits.unbind()
        table.slots.extend(path)
        free = decoys + free
    return logits


def chunks(model: Model, sequence: list[int], size: int) -> list[torch.Tensor]:
    table, logits = SlotTable(), []
    slots = random.Random(9).sample(range(1, 1000), len(sequence))
    for start in range(0, len(sequence), size):
        part = sequence[start : start + size]
        table.slots.extend(slots[start : start + size])
        rows = [table.row(token, start + i) for i, token in enumerate(part)]
        logits += model.run(rows, range(len(rows))).logits.unbind()
    return logits


def lockstep(model: Model, sequences: list[list[int]]) -> list[list[torch.Tensor]]:
    """Run one token of every unfinished sequence in each pass."""
    tables = [SlotTable() for _ in sequences]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    free = list(range(2000, 0, -1))
    for position in range(max(map(len, sequences))):
        live = [i for i, sequence in enumerate(sequences) if position < len(sequence)]
        for i in live:
            tables[i].slots.append(free.pop())
        rows = [tables[i].row(sequences[i][position], position) for i in live]
        for i, row in zip(live, model.run(rows, range(len(rows))).logits, strict=True):
            logits[i].append(row)
    return logits


def assert_same(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    different = [i for i, (a, b) in enumerate(zip(ours, exact, strict=True)) if not torch.equal(a, b)]
    assert not different, f"{len(different)} of {len(exact)} rows differ, first at {different[:5]}"
