"""Rows: token positions in one forward pass, and how each row attends to its own path.

With torch's operators a row attends in two parts. The *prefix* is its path's full tiles of `TILE` positions. The *tail*
is the last tile; the key of position n is in column n mod TILE, both for committed tokens and for guesses on the row's
path. So a row's result depends on its own path alone: not on the other rows of the pass, not on where a key is in
memory, not on whether the path was decoded, prefilled in chunks or guessed.

Rows whose paths extend one another (a prefill chunk, a chain of guesses) share a tail under a causal mask, in groups of
`GROUP`; each other branch of the tree has its own tail. Both forms agree bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.upload import send

TILE = 64
"""Positions per tile: columns of the tail, and the unit in which a prefix is extended."""
BLOCK_SIZE = 16
"""Positions per block of a prefix that requests share."""
GROUP = 8
"""Rows that share a tail. Rows are padded to a multiple of it."""
NULL_SLOT = 0
"""Never allocated or written: masked columns point to it."""


class Prefix(NamedTuple):
    """The full tiles of a path: the first `length` slots of a table, then a branch. Rows with equal ones share an
    attention call."""

    slot_table: SlotTable
    length: int
    branch: tuple[int, ...] = ()

    def slots(self) -> torch.Tensor:
        """int64 [full tiles * TILE]"""
        parts = (self.slot_table.slots[: self.length], self.branch)
        return torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in parts]))


class Row(NamedTuple):
    """One token to run. Its path is the first `length` slots of the slot table, then `branch`, which may be empty."""

    token: int
    position: int
    slot_table: SlotTable
    length: int
    branch: Sequence[int] = ()

    @property
    def slot(self) -> int:
        """The slot for its key and value: the last of its path."""
        return self.branch[-1] if self.branch else self.slot_table.slots[self.length - 1]

    def path(self, start: int = 0) -> list[int]:
        """The slots of its path from position `start` on."""
        below = max(0, start - self.length)
        return [*self.slot_table.slots[start : self.length], *self.branch[below:]]

    @property
    def tile(self) -> list[int]:
        """The slots of its path from the last tile border on."""
        return self.path(self.position // TILE * TILE)

    @property
    def prefix(self) -> Prefix:
        """The full tiles of its path."""
        end = self.position // TILE * TILE
        return Prefix(self.slot_table, min(end, self.length), tuple(self.branch[: max(0, end - self.length)]))


class SlotTable:
    """The slots of one request's path, by position. The owner appends, truncates and frees slots.

    The slots are contiguous 32-bit integers, which native code reads in place.
    """

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._slots = array("i", slots)
        self.sent = 0
        """How many of the first slots a copy in a GPU's memory has."""
        self.rooted = 0
        """How many of the first tokens the states at the root have read, see `paceline.model.states`; 0: there are
        none."""

    @property
    def slots(self) -> array[int]:
        return self._slots

    @slots.setter
    def slots(self, slots: Iterable[int]) -> None:
        self._slots, self.sent, self.rooted = array("i", slots), 0, 0

    @property
    def address(self) -> int:
        """Address of the slots. Valid until a slot is added."""
        return self._slots.buffer_info()[0]

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep only the first `length` positions."""
        del self._slots[length:]
        self.sent = min(self.sent, length)
        if length < self.rooted:
            self.rooted = 0

    def row(self, token: int, position: int) -> Row:
        """The row of a position in this table."""
        return Row(token, position, self, position + 1)

    def branch_row(self, token: int, branch: Sequence[int]) -> Row:
        """The row of a guess: `branch` has the slots of its path after this table, its own last."""
        length = len(self._slots)
        return Row(token, length + len(branch) - 1, self, length, tuple(branch))


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that share a prefix: int64 row indices, padded to a multiple of GROUP, and the prefix's slots."""

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowBatch:
    """One pass, laid out for attention. R rows (padded to a multiple of GROUP), G groups of tails.

    tokens, positions, slots: int64 [R]. tiles: int64 [G * TILE], the slots of each group's tail. groups:
    int64 [G, GROUP], row indices; a short group repeats its first. reach: int64 [G, GROUP], the last tail column that
    each row of a group sees. `segments` has no rows without a prefix.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    groups: torch.Tensor
    reach: torch.Tensor
    segments: list[Segment]


def device_integers(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Numbers, or lists of as many numbers, or a tensor of the CPU, as a tensor there. Waits for no GPU."""
    return send(torch.as_tensor(values, dtype=dtype), device)


def build_row_batch(rows: Sequence[Row], device: torch.device, padding_slot: int) -> RowBatch:
    """Group rows by shared tails and by shared prefixes. Rows keep their order; padding rows come last and write to
    `padding_slot`: they may compute NaN, which a masked column would spread."""

    def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return device_integers(values, device)

    size = -(-len(rows) // GROUP) * GROUP
    padding = size - len(rows)
    tokens = integers([*(row.token for row in rows), *[0] * padding])
    positions = integers([*(row.position for row in rows), *[0] * padding])
    slots = integers([*(row.slot for row in rows), *[padding_slot] * padding])
    tails = [row.tile for row in rows]
    tiles: list[int] = []
    groups: list[list[int]] = []
    reach: list[list[int]] = []
    for members in _groups(tails):
        longest = tails[members[-1]]
        tiles += longest
        tiles += [NULL_SLOT] * (TILE - len(longest))
        members = members + [members[0]] * (GROUP - len(members))
        groups.append(members)
        reach.append([len(tails[r]) - 1 for r in members])
    return RowBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        tiles=integers(tiles),
        groups=integers(groups),
        reach=integers(reach),
        segments=[
            Segment(integers(members + [members[0]] * (-len(members) % GROUP)), device_integers(prefix.slots(), device))
            for prefix, members in _by_prefix(rows).items()
        ],
    )


def _by_prefix(rows: Sequence[Row]) -> dict[Prefix, list[int]]:
    """Indices of the rows with each prefix."""
    members: dict[Prefix, list[int]] = {}
    for r, row in enumerate(rows):
        if row.position >= TILE:
            members.setdefault(row.prefix, []).append(r)
    return members


def _groups(tails: Sequence[Sequence[int]]) -> list[list[int]]:
    """Row indices by group. Within a group each tail extends the one before it."""
    full: list[list[int]] = []
    unfilled: dict[int, list[int]] = {}  # by the last slot of the group's longest tail
    for r, tile in enumerate(tails):
        group = unfilled.pop(tile[-2], None) if len(tile) > 1 else None
        group = [] if group is None else group
        group.append(r)
        if len(group) == GROUP:
            full.append(group)
        else:
            unfilled[tile[-1]] = group
    return full + list(unfilled.values())
