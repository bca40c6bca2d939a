"""How the rows of a pass find their keys in a GPU's memory: by slot tables that stay there, and guesses' branches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.model.rows import GROUP, Row, SlotTable


class RowPaths(NamedTuple):
    """The paths of a pass' R rows, int32, in a GPU's memory. Kernels read them when they run, so earlier kernels of the
    same graph may write them.

    Row r sees the positions 0 to seen[r] - 1. The slot of position p is tables[table[r], p] below committed[r], and
    branches[branch[r] + p - committed[r]] from there on.

    tables [T, N]: the slots of requests' paths, by position.
    table, committed, seen, branch [R]. A padding row has seen 0. For others seen is the row's position + 1.
    branches [B]: slots of guesses.
    groups [G + 1]: group g has the rows groups[g] to groups[g + 1] - 1: at most GROUP adjacent rows with one table and
    the same `committed`, or with no branches at all. Groups that are left are empty.
    """

    tables: Tensor
    table: Tensor
    committed: Tensor
    seen: Tensor
    branch: Tensor
    branches: Tensor
    groups: Tensor


class DeviceTables:
    """Copies of requests' slot tables in a GPU's memory: int32 [tables + 1, positions]. What changed of one is sent.

    A request's table keeps its place until others need it, the one that was used longest ago first. The last one is of
    no request: it takes writes that fill up memory.
    """

    def __init__(self, tables: int, positions: int, device: torch.device) -> None:
        self.count = tables
        self.data = torch.zeros(tables + 1, positions, dtype=torch.int32, device=device)
        self._indices: OrderedDict[SlotTable, int] = OrderedDict()

    def assign(self, tables: Iterable[SlotTable]) -> tuple[dict[SlotTable, int], np.ndarray]:
        """Where the tables of a pass are, and what has to be written there before: int32 [W, 3], table, position and
        slot.

        Raises ValueError if a pass has more tables than there are indices.
        """
        indices = dict.fromkeys(tables, -1)
        if len(indices) > self.count:
            raise ValueError(f"a pass of {len(indices)} requests: on a GPU it has {self.count} at most")
        for table in indices:
            if table in self._indices:
                self._indices.move_to_end(table)
                indices[table] = self._indices[table]
        writes = [np.zeros((0, 3), np.int32)]
        for table, index in indices.items():
            if index < 0:
                index = len(self._indices)
                if index == self.count:
                    _, index = self._indices.popitem(last=False)
                indices[table] = self._indices[table] = index
                table.sent = 0
            if table.sent < len(table):
                new = np.full((len(table) - table.sent, 3), index, np.int32)
                new[:, 1] = range(table.sent, len(table))
                new[:, 2] = table.slots[table.sent :]
                writes.append(new)
                table.sent = len(table)
        return indices, np.concatenate(writes)

    def padded(self, writes: np.ndarray, count: int) -> np.ndarray:
        """As many writes as a graph does. Those that are none fill up the last table."""
        unused = np.zeros((count - len(writes), 3), np.int32)
        unused[:, 0] = self.count
        return np.concatenate([writes, unused])


def grouped(rows: Sequence[Row]) -> list[int]:
    """`RowPaths.groups` of rows, without the empty ones."""
    bounds: list[int] = []
    first: Row | None = None
    equal = plain = True
    for r, row in enumerate(rows):
        if first is not None and r - bounds[-1] < GROUP and row.slot_table is first.slot_table:
            equal, plain = equal and row.length == first.length, plain and not row.branch
            if equal or plain:
                continue
        bounds.append(r)
        first, equal, plain = row, True, not row.branch
    return [*bounds, len(rows)]
