"""Rows: token positions in one forward pass, and how each of them sees its own past.

Every row attends in two parts. The *prefix* is its path's full tiles of `TILE` positions. The *tail* is the last
tile, where the key of position n stands in column n mod TILE, whether it was committed long ago or is a guess on
this row's own path. So what a row computes depends on its own path alone: not on its company in the pass, not on
where a key lies in memory, not on whether the path was decoded, prefilled in chunks or guessed.

Rows whose paths extend one another (a prefill chunk, a chain of guesses) share a tail under a causal mask, in
groups of `GROUP`; another branch of the tree gets a tail of its own. Both ways agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE = 64
"""Positions per tile: columns of the tail, and the unit in which a prefix grows."""
GROUP = 8
"""Rows that share a tail; attention always works on whole groups. Rows are padded to a multiple of it."""
SPARE_SLOT = 0
"""Never handed out: padding rows write here, and masked columns point here."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The slots of a path's full tiles: int64 [tiles * TILE]. Rows of one pass that share the object share a call."""

    slots: torch.Tensor


EMPTY_PREFIX = Prefix(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Row:
    """One token to run. `tile` holds the slots of its path from the last tile border to itself."""

    token: int
    position: int
    prefix: Prefix
    tile: Sequence[int]

    @property
    def slot(self) -> int:
        """Where its key and value go."""
        return self.tile[-1]


class Lane:
    """The slots of one request's path, by position. The owner appends, truncates and frees; rows are built here."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._prefixes: list[Prefix] = [EMPTY_PREFIX]

    def __len__(self) -> int:
        return len(self.slots)

    def clear(self) -> None:
        self.slots.clear()
        del self._prefixes[1:]

    def truncate(self, length: int) -> None:
        """Only the first `length` positions remain."""
        del self.slots[length:]
        del self._prefixes[length // TILE + 1 :]

    def row(self, token: int, position: int) -> Row:
        """The row of a position that has a slot here."""
        start = position // TILE * TILE
        return Row(token, position, self.prefix(position // TILE), self.slots[start : position + 1])

    def branch_row(self, token: int, branch: Sequence[int]) -> Row:
        """The row of a guess: `branch` holds the slots of its path below this lane, its own last."""
        position = len(self.slots) + len(branch) - 1
        start = position // TILE * TILE
        below = start - len(self.slots)
        if below <= 0:
            return Row(token, position, self.prefix(position // TILE), [*self.slots[start:], *branch])
        # The path crosses into a tile of its own, so its prefix is its own too.
        whole = Prefix(torch.tensor([*self.slots, *branch[:below]], dtype=torch.int64))
        return Row(token, position, whole, branch[below:])

    def prefix(self, tiles: int) -> Prefix:
        """The first `tiles` tiles. Made once, so that rows share it."""
        while len(self._prefixes) <= tiles:
            end = len(self._prefixes) * TILE
            self._prefixes.append(Prefix(torch.tensor(self.slots[:end], dtype=torch.int64)))
        return self._prefixes[tiles]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that share a prefix: int64 indices of rows, padded to a multiple of GROUP, and its slots."""

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowBatch:
    """One pass, laid out for attention. R rows (padded to a multiple of GROUP), G groups of tails.

    tokens, positions, slots: int64 [R]. tiles: int64 [G * TILE], the slots of each group's tail. groups:
    int64 [G, GROUP], the row in each place; a short group repeats its first. reach: int64 [G, GROUP], the last
    tail column that each place sees. `segments` leaves out rows without a prefix.
    """

    count: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    groups: torch.Tensor
    reach: torch.Tensor
    segments: list[Segment]


def lay_out(rows: Sequence[Row], device: torch.device) -> RowBatch:
    """Group rows by shared tails and by shared prefixes. Rows keep their order; padding rows come last."""

    def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    padding = -len(rows) % GROUP
    tiles: list[int] = []
    groups: list[list[int]] = []
    reach: list[list[int]] = []
    for members in _groups(rows):
        longest = rows[members[-1]].tile
        tiles += longest
        tiles += [SPARE_SLOT] * (TILE - len(longest))
        members = members + [members[0]] * (GROUP - len(members))
        groups.append(members)
        reach.append([len(rows[r].tile) - 1 for r in members])
    return RowBatch(
        count=len(rows),
        tokens=integers([r.token for r in rows] + [0] * padding),
        positions=integers([r.position for r in rows] + [0] * padding),
        slots=integers([r.slot for r in rows] + [SPARE_SLOT] * padding),
        tiles=integers(tiles),
        groups=integers(groups),
        reach=integers(reach),
        segments=[
            Segment(integers(members + [members[0]] * (-len(members) % GROUP)), prefix.slots.to(device))
            for prefix, members in _by_prefix(rows).items()
        ],
    )


def _by_prefix(rows: Sequence[Row]) -> dict[Prefix, list[int]]:
    """Indices of the rows that share each prefix; rows without one are left out."""
    members: dict[Prefix, list[int]] = {}
    for r, row in enumerate(rows):
        if row.prefix is not EMPTY_PREFIX:
            members.setdefault(row.prefix, []).append(r)
    return members


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices by group, shortest tail first: in a group, each tail extends the one before it."""
    full: list[list[int]] = []
    growing: dict[int, list[int]] = {}  # by the last slot of the group's longest tail
    for r, row in enumerate(rows):
        tile = row.tile
        group = growing.pop(tile[-2], None) if len(tile) > 1 else None
        group = [] if group is None else group
        group.append(r)
        if len(group) == GROUP:
            full.append(group)
        else:
            growing[tile[-1]] = group
    return full + list(growing.values())
