"""The rows of a pass as one tensor of integers, for the other ranks. They keep slot tables, and get what has changed.

A message has, one after another: the numbers of rows, wanted rows, changed tables and forgotten tables; for each row
token, position, number of its table, length and length of its branch; the wanted rows; for each changed table its
number, the positions that stay as they are and the number of new ones; the forgotten tables; the new slots of all
changed tables; all branches.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from itertools import chain, count, islice

import torch
from torch import Tensor

from paceline.model.rows import Row, SlotTable

HEADER, PER_ROW, PER_TABLE = 4, 5, 3
"""Numbers in a message's header, for a row and for a changed table."""


class RowEncoder:
    """Rank 0's side. Every message has to reach every rank, in order."""

    def __init__(self) -> None:
        self._sent: weakref.WeakKeyDictionary[SlotTable, tuple[int, array[int]]] = weakref.WeakKeyDictionary()
        self._numbers = count()
        self._forgotten: list[int] = []

    def encode(self, rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
        """int64 [n]. `wanted`: the rows whose logits are computed."""
        forgotten = self._forgotten[:]
        del self._forgotten[: len(forgotten)]  # a table may end meanwhile
        changes: list[int] = []
        slots: list[int] = []
        for table in {id(row.slot_table): row.slot_table for row in rows}.values():
            number, sent = self._known(table)
            kept = _common_length(sent, table.slots)
            if kept == len(sent) == len(table):
                continue
            del sent[kept:]
            sent.extend(table.slots[kept:])
            changes += (number, kept, len(sent) - kept)
            slots += sent[kept:]
        numbers = [len(rows), len(wanted), len(changes) // PER_TABLE, len(forgotten)]
        numbers += chain.from_iterable(
            (row.token, row.position, self._sent[row.slot_table][0], row.length, len(row.branch)) for row in rows
        )
        numbers += chain(wanted, changes, forgotten, slots, *(row.branch for row in rows))
        return torch.tensor(numbers)

    def _known(self, table: SlotTable) -> tuple[int, array[int]]:
        """A table's number, and the slots that the ranks have of it."""
        if (known := self._sent.get(table)) is None:
            known = self._sent[table] = next(self._numbers), array("i")
            weakref.finalize(table, self._forgotten.append, known[0]).atexit = False
        return known


class RowDecoder:
    """Another rank's side."""

    def __init__(self) -> None:
        self._tables: dict[int, SlotTable] = {}

    def decode(self, encoded: Tensor) -> tuple[list[Row], list[int]]:
        """The encoded rows, and the wanted ones. Rows of one table have the same one here, in every pass."""
        numbers = iter(encoded.tolist())

        def take(count: int) -> list[int]:
            return list(islice(numbers, count))

        row_count, wanted_count, change_count, forgotten_count = take(HEADER)
        fields = [take(PER_ROW) for _ in range(row_count)]
        wanted = take(wanted_count)
        changes = [take(PER_TABLE) for _ in range(change_count)]
        forgotten = take(forgotten_count)
        for number, kept, added in changes:
            table = self._tables.setdefault(number, SlotTable())
            table.truncate(kept)
            table.slots.extend(take(added))
        for number in forgotten:
            del self._tables[number]
        return [
            Row(token, position, self._tables.setdefault(table, SlotTable()), length, take(branch))
            for token, position, table, length, branch in fields
        ], wanted


def _common_length(a: array[int], b: array[int]) -> int:
    """How many first numbers are the same."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
