"""A pass over rows on a GPU, whose kernels read all that they need of the rows in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.model.attention import AttentionOptions, KVCache
from paceline.model.gpu.memory import GRAPH_ROWS
from paceline.model.gpu.paths import DeviceTables, RowPaths, grouped
from paceline.model.rows import GROUP, Row, SlotTable, device_integers

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
    """A `Pass` by such kernels. tokens, positions, slots: int32 [R]. All is read when kernels run."""

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
        new = np.concatenate(
            [np.zeros((0, 3), np.int32)]
            + [
                np.column_stack([np.full(len(slots), table), np.arange(at, at + len(slots)), np.asarray(slots)])
                for table, at, slots in writes
            ]
        ).astype(np.int32)
        capacity = len(self.writes)
        if len(new) > capacity:
            kernels.write_tables(self.tables.data, device_integers(new, self._vector.device, torch.int32))
            new = new[:0]
        unused = np.tile(np.array([self.tables.count, 0, 0], np.int32), capacity - len(new))
        vector = np.concatenate([self._rows(rows, indices, padding_slot), new.ravel(), unused, self._branches(rows)])
        self._vector.copy_(device_integers(vector, self._vector.device, torch.int32), non_blocking=True)

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
