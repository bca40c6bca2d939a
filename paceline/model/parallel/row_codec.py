"""The rows of a pass as one tensor, which rank 0 broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from paceline.model.rows import Row, SlotTable

FIXED = 3
"""Numbers in the header: rows, wanted rows, tables. Then come the tables' lengths, five numbers for each row (token,
position, table, length, branch length), the wanted rows, the slots of all tables, all branches."""
PER_ROW = 5


def encode_rows(rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
    """int64 [n]. `wanted`: the rows whose logits are computed."""
    tables = {id(row.slot_table): row.slot_table for row in rows}
    index = {key: i for i, key in enumerate(tables)}
    fields = ((r.token, r.position, index[id(r.slot_table)], r.length, len(r.branch)) for r in rows)
    numbers = [len(rows), len(wanted), len(tables)]
    numbers += map(len, tables.values())
    numbers += chain.from_iterable(fields)
    numbers += wanted
    for table in tables.values():
        numbers += table.slots
    for row in rows:
        numbers += row.branch
    return torch.tensor(numbers)


def decode_rows(encoded: Tensor) -> tuple[list[Row], list[int]]:
    """The encoded rows, and the wanted ones. Rows that shared a slot table share a new one."""
    numbers = iter(encoded.tolist())

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    row_count, wanted_count, table_count = take(FIXED)
    lengths = take(table_count)
    fields = [take(PER_ROW) for _ in range(row_count)]
    wanted = take(wanted_count)
    tables = [SlotTable(take(length)) for length in lengths]
    return [
        Row(token, position, tables[table], length, take(branch)) for token, position, table, length, branch in fields
    ], wanted
