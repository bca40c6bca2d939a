"""The rows of a pass as one tensor, to give it to the other ranks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from paceline.model.rows import Row, SlotTable

FIXED = 3
"""Numbers at the beginning: rows, wanted rows, lanes. Then come the lanes' lengths, five numbers for each row (token,
position, lane, length, branch length), the wanted rows, all lanes' slots, all branches."""
PER_ROW = 5


def encode_rows(rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
    """int64 [n]. `wanted`: the rows whose logits are asked for."""
    lanes = {id(row.slot_table): row.slot_table for row in rows}
    number = {key: i for i, key in enumerate(lanes)}
    each = ((r.token, r.position, number[id(r.slot_table)], r.length, len(r.branch)) for r in rows)
    numbers = [len(rows), len(wanted), len(lanes)]
    numbers += map(len, lanes.values())
    numbers += chain.from_iterable(each)
    numbers += wanted
    for lane in lanes.values():
        numbers += lane.slots
    for row in rows:
        numbers += row.branch
    return torch.tensor(numbers)


def decode_rows(order: Tensor) -> tuple[list[Row], list[int]]:
    """What was packed. Lanes are new, and shared as they were."""
    numbers = iter(order.tolist())

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    rows, wanted, lanes = take(FIXED)
    lengths = take(lanes)
    each = [take(PER_ROW) for _ in range(rows)]
    places = take(wanted)
    tables = [SlotTable(take(length)) for length in lengths]
    return [
        Row(token, position, tables[lane], length, take(branch)) for token, position, lane, length, branch in each
    ], places
