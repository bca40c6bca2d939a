"""Rows of several requests, as passes have them."""

from __future__ import annotations

import random

from paceline.model.rows import TILE, Row, SlotTable


def random_rows(generator: random.Random, slot_count: int, most: int, longest: int = 3 * TILE) -> list[Row]:
    """Chunks, chains and branches of several requests, whose slots are scattered among 1 to `slot_count`."""
    slots = iter(generator.sample(range(1, slot_count + 1), slot_count))
    rows: list[Row] = []
    while len(rows) < most - 8 and (not rows or generator.random() < 0.8):
        length = generator.choice([1, TILE - 1, TILE, TILE + 1, 2 * TILE - 2, generator.randrange(1, longest - 8)])
        table = SlotTable(next(slots) for _ in range(length))
        chunk = generator.randrange(0, min(4, length))
        rows += [table.row(7, position) for position in range(length - chunk, length)]
        branch: list[int] = []
        for _ in range(generator.randrange(5)):
            rows.append(table.branch_row(8, [*branch, next(slots)]))
            branch.append(next(slots))
            rows.append(table.branch_row(9, branch))
        rows = rows[:most]
    return rows
