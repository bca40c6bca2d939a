"""A pass over rows on a GPU, whose kernels read all that they need of the rows in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.upload import send, send_into
from paceline.model.attention import AttentionOptions, KVCache
from paceline.model.gpu.memory import GRAPH_ROWS
from paceline.model.gpu.paths import DeviceTables, RowPaths, grouped
from paceline.model.rows import GROUP, Row, SlotTable

WRITES, BRANCHES = 8, 32
"""Of a graph's memory, for each of its rows: slots that are new in tables, and slots of guesses' paths."""


class Kernels(Protocol):
    """What computes on a GPU: see `paceline.model.gpu.attention_kernels` and `layer_kernels`."""

    def write_tables(self, tables: Tensor, writes: Tensor) -> None: ...

    def plan(self, paths: RowPaths) -> Tensor: ...

    def attend(
        self,
        query: Tensor,
        data: Tensor,
        paths: RowPaths,
        plan: Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]: ...

    def join(
        self,
        tokens: Tensor,
        embedding: Tensor,
        states: Tensor,
        token_norm: Tensor | None,
        state_norm: Tensor | None,
        eps: float,
        *,
        norms_residual: bool,
    ) -> tuple[Tensor, Tensor]: ...

    def rotate_and_store(
        self,
        projected: Tensor,
        positions: Tensor,
        slots: Tensor,
        cosines: Tensor,
        sines: Tensor,
        data: Tensor,
        norms: Tensor | None,
        eps: float,
    ) -> Tensor: ...

    def silu_times(self, x: Tensor) -> Tensor: ...


@dataclass(slots=True)
class PagedPass:
    """A `Pass` by such kernels. tokens, positions, slots: int32 or int64 [R]. All is read when kernels run."""

    cache: KVCache
    kernels: Kernels
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    paths: RowPaths
    plan: Tensor | None = None
    """Of these paths, or of longer ones in the same groups; None: made when a layer attends first."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        self.cache.store(layer, self.slots.long(), key, value)
        return self.attend_to_stored(query, layer, options)

    def attend_to_stored(self, query: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        """As `attend`, where the pass' keys and values are in the cache."""
        if self.plan is None:
            self.plan = self.kernels.plan(self.paths)
        return self.kernels.attend(
            query,
            self.cache.data[layer],
            self.paths,
            self.plan,
            scale=options.scale,
            softcap=options.softcap,
            window=options.window,
            sinks=options.sinks,
        )


def fitting(writes: np.ndarray, count: int, tables: DeviceTables, kernels: Kernels) -> np.ndarray:
    """The `count` writes, [count, 3], of a graph that is replayed next: see `DeviceTables`. If there are more of them,
    all are done here."""
    if len(writes) > count:
        kernels.write_tables(tables.data, send(torch.from_numpy(writes), tables.data.device))
        writes = writes[:0]
    return tables.padded(writes, count)


class PassInput:
    """A vector in a GPU's memory, int32, with all that a pass of `size` rows reads of its rows."""

    def __init__(self, tables: DeviceTables, size: int, writes: int, branches: int) -> None:
        """`writes`, `branches`: room for new slots of tables, and for slots of guesses' paths."""
        self.size, self.tables, self._counts = size, tables, [*[size] * 7, size + 1, 3 * writes, branches]
        self._vector = torch.zeros(sum(self._counts), dtype=torch.int32, device=tables.data.device)
        self.tokens, self.positions, self.slots, *table, writes_, branches_ = self._vector.split(self._counts)
        table, committed, seen, branch, groups = table
        self.writes = writes_.view(writes, 3)
        self.paths = RowPaths(tables.data, table, committed, seen, branch, branches_, groups)

    @classmethod
    def of(cls, tables: DeviceTables, kernels: Kernels, rows: Sequence[Row], padding_slot: int) -> PassInput:
        """That of some rows, padded as for a graph, so that products have the numbers of rows that are probed."""
        size = next((size for size in GRAPH_ROWS if size >= len(rows)), -(-len(rows) // GROUP) * GROUP)
        this = cls(tables, size, 0, max(1, sum(len(row.branch) for row in rows)))
        this.load(rows, kernels, padding_slot)
        return this

    def fits(self, rows: Sequence[Row]) -> bool:
        return len(rows) <= self.size and sum(len(row.branch) for row in rows) <= self._counts[-1]

    def load(self, rows: Sequence[Row], kernels: Kernels, padding_slot: int) -> None:
        """One copy of what these rows are, which fit; and another one of new slots where there are too many."""
        indices, writes = self.tables.assign(row.slot_table for row in rows)
        writes = fitting(writes, len(self.writes), self.tables, kernels)
        vector = np.concatenate([self._rows(rows, indices, padding_slot), writes.ravel(), self._branches(rows)])
        send_into(torch.from_numpy(vector), self._vector)

    def _rows(self, rows: Sequence[Row], indices: dict[SlotTable, int], padding_slot: int) -> np.ndarray:
        left = self.size - len(rows)
        bounds = grouped(rows)
        starts = np.cumsum([0, *(len(row.branch) for row in rows)])[: len(rows)]
        columns = (
            [row.token for row in rows] + [0] * left,
            [row.position for row in rows] + [0] * left,
            [row.slot for row in rows] + [padding_slot] * left,
            [indices[row.slot_table] for row in rows] + [0] * left,
            [row.length for row in rows] + [0] * left,
            [row.position + 1 for row in rows] + [0] * left,
            [*starts, *[0] * left],
            bounds + [len(rows)] * (self.size + 1 - len(bounds)),
        )
        return np.fromiter(chain(*columns), np.int32, sum(self._counts[:8]))

    def _branches(self, rows: Sequence[Row]) -> np.ndarray:
        slots = np.zeros(self._counts[-1], np.int32)
        guesses = list(chain.from_iterable(row.branch for row in rows))
        slots[: len(guesses)] = guesses
        return slots

    def start(self, cache: KVCache, kernels: Kernels) -> PagedPass:
        """A pass over this input, whatever is loaded when its kernels run."""
        if len(self.writes):
            kernels.write_tables(self.tables.data, self.writes)
        return PagedPass(cache, kernels, self.tokens, self.positions, self.slots, self.paths)
