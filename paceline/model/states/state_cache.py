"""States of requests' paths: where each pass finds a row's past, and what it keeps for the next one.

A layer that keeps a state has read every token of a path once, in order. A request has one state per layer, at its
*root*: after all its committed tokens whose rows have run. A row's own state is computed in passing, from the root
along the row's path. Of a guess only the inputs of its update are kept. The next pass, in which the request's slot
table tells what was accepted, advances the root by these inputs: no weight is read for that, and nothing is undone
for a guess that was refused.

So a state's sums follow from its path alone, token by token: they do not depend on chunks of the prompt, on other rows
of a pass, or on what was guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from paceline.model.rows import Row, SlotTable, device_integers

NO_INPUT = 0
"""The index of a zero in a convolution's memory: what is before a path's first token."""


class StateLostError(RuntimeError):
    """A row's past is neither in its request's state nor in the pass."""


class Level(NamedTuple):
    """Tokens of a pass that are equally far from their roots, as int64 indices. Those before this pass come first."""

    parents: Tensor
    """Into the level above; for the first level into `StatePass.roots`."""
    guesses: Tensor
    """Into kept inputs: of tokens that ran earlier."""
    rows: Tensor
    """Into the pass."""
    ends: Tensor
    """Into this level: the last committed tokens of requests."""
    ended_roots: Tensor
    """The states of these requests."""


class TokenOrder(NamedTuple):
    """The same tokens for native code, each after its parent. A token begins at a state as it was before the pass."""

    parents: Tensor
    """A token, or ~ the index of the state where a path begins."""
    sources: Tensor
    """A row, or ~ the index of kept inputs."""
    saves: Tensor
    """[n, 2], by token: a token, and the state that it replaces."""
    rows: int
    """Of the pass, without padding."""


@dataclass(frozen=True, slots=True)
class StatePass:
    """One pass through the states. All tensors are int64 on the device.

    levels, order: the tokens, for torch or for native code; the other one is empty or None. roots [T]: the states from
    which paths begin. fresh: those that are zero. windows [R, M]: of each row, the inputs of the M tokens before it, in
    a convolution's memory; tails [T', M] the same of what comes after `tail_roots`. guesses, entries [G]: rows whose
    inputs are kept, and where.
    """

    roots: Tensor
    fresh: Tensor
    levels: Sequence[Level]
    order: TokenOrder | None
    windows: Tensor
    tail_roots: Tensor
    tails: Tensor
    guesses: Tensor
    entries: Tensor


class StateCache:
    """Which request has which state, and where the inputs of guesses are. `paceline.model.states.recurrences` keeps
    the numbers."""

    def __init__(self, requests: int, guesses: int, window: int, device: torch.device, *, native: bool = False) -> None:
        """`requests`, `guesses`: as many states, and inputs of guesses, are kept. `window`: M, the tokens before its
        own that the longest convolution reads. `native`: whether native code computes the passes."""
        self.requests, self.guesses, self.window, self.device = requests, guesses, window, device
        self.native = native
        self._roots: WeakKeyDictionary[SlotTable, int] = WeakKeyDictionary()
        self._entries: OrderedDict[int, int] = OrderedDict()
        """By slot, the oldest first."""
        self._guessed: WeakSet[SlotTable] = WeakSet()
        """Tables after which the last passes had guesses."""

    @property
    def first_entry(self) -> int:
        """Of kept inputs, in a convolution's memory: NO_INPUT, then M of each request, then these, then the rows."""
        return 1 + self.requests * self.window

    @property
    def first_row(self) -> int:
        return self.first_entry + self.guesses

    def paths(self, rows: Sequence[Row], padded: int) -> StatePass:
        """That of the next pass, `padded` rows long. Raises `StateLostError`, or ValueError if there are more requests
        or guesses than the cache has room for."""
        members: dict[SlotTable, list[int]] = {}
        for r, row in enumerate(rows):
            members.setdefault(row.slot_table, []).append(r)
        guesses = [r for r, row in enumerate(rows) if row.branch]
        if len(guesses) > self.guesses:
            raise ValueError(f"a pass of {len(guesses)} guesses: states are kept for {self.guesses}")
        paths = _Paths(self, padded)
        for table in [each for each in self._guessed if each not in members]:
            if 0 < table.rooted < len(table):  # its guesses were verified, and it does not run in this pass
                self._advance(paths, table, len(table))
                paths.end_trunk()
                table.rooted = len(table)
        for table, indices in members.items():
            self._follow(paths, table, [(r, rows[r]) for r in indices])
        self._guessed = WeakSet(rows[r].slot_table for r in guesses)
        for row in rows:
            self._entries.pop(row.slot, None)  # of an earlier guess in this slot
        used = set(self._entries.values())
        free = (entry for entry in range(self.guesses) if entry not in used)
        entries: list[int] = []
        for r in guesses:
            entry = next(free, None)
            if entry is None:
                _, entry = self._entries.popitem(last=False)
            self._entries[rows[r].slot] = entry
            entries.append(entry)
        return paths.built(guesses, entries)

    def _follow(self, paths: _Paths, table: SlotTable, rows: Sequence[tuple[int, Row]]) -> None:
        """Add the rows of one request."""
        committed = sorted((row.position, r) for r, row in rows if not row.branch)
        lengths = {row.length for _, row in rows if row.branch}
        start = committed[0][0] if committed else min(lengths)
        stop = start + len(committed)
        if start < table.rooted:
            table.rooted = 0
        if [position for position, _ in committed] != list(range(start, stop)) or lengths - {stop}:
            raise StateLostError("rows of one request leave out tokens of its path")
        self._advance(paths, table, start)
        for _, r in committed:
            paths.add_row(r)
        paths.end_trunk()
        table.rooted = stop
        for r, row in rows:
            if row.branch:
                self._branch(paths, r, row)

    def _advance(self, paths: _Paths, table: SlotTable, stop: int) -> None:
        """Begin a path at the request's root, and add the accepted tokens before position `stop`."""
        paths.begin(self._root(table), fresh=table.rooted == 0)
        for slot in table.slots[table.rooted : stop]:
            paths.add_kept(self._entry(slot))

    def _branch(self, paths: _Paths, r: int, row: Row) -> None:
        paths.go_to_trunk()
        for slot in row.branch[:-1]:
            if not paths.go_to(slot):
                paths.add_kept(self._entry(slot), slot)
        paths.add_row(r, row.slot)

    def _entry(self, slot: int) -> int:
        entry = self._entries.get(slot)
        if entry is None:
            raise StateLostError("tokens before a row are not in its request's state")
        return entry

    def _root(self, table: SlotTable) -> int:
        index = self._roots.get(table)
        if index is None:
            used = set(self._roots.values())
            index = next((n for n in range(self.requests) if n not in used), None)
            if index is None:
                idle = next((each for each in self._roots if each.rooted == 0), None)
                if idle is None:
                    raise ValueError(f"more than {self.requests} requests keep states: raise max_num_seqs")
                index = self._roots.pop(idle)
            self._roots[table] = index
            table.rooted = 0
        return index

    def check_integrity(self) -> None:
        """Raises AssertionError unless every state, and every entry of a guess, has one owner."""
        for owned, count in ((list(self._roots.values()), self.requests), (list(self._entries.values()), self.guesses)):
            if len(set(owned)) != len(owned) or any(not 0 <= each < count for each in owned):
                raise AssertionError(f"of {count} states or guesses' inputs some have two owners: {sorted(owned)}")


@dataclass(slots=True)
class _Token:
    """A token on a path, in the pass or before it."""

    level: int
    index: int
    """Among the tokens of its level, those of earlier passes and rows apart."""
    is_row: bool
    inputs: tuple[int, ...]
    """Of a convolution: its own last, those of the tokens before it first; M + 1."""
    number: int
    """In the order of a pass."""


@dataclass(slots=True)
class _OpenLevel:
    kept: list[tuple[_Token | int, int]] = field(default_factory=list)
    """A parent, or a root's index among those of the pass, and an entry."""
    rows: list[tuple[_Token | int, int]] = field(default_factory=list)
    ends: list[tuple[_Token, int]] = field(default_factory=list)


class _Paths:
    """Builds a `StatePass`, one path after another."""

    def __init__(self, cache: StateCache, padded: int) -> None:
        self._cache, self._padded = cache, padded
        self._roots: list[int] = []
        self._fresh: list[int] = []
        self._levels: list[_OpenLevel] = []
        self._parents: list[int] = []
        self._sources: list[int] = []
        self._saves: list[tuple[int, int]] = []
        self._windows: dict[int, tuple[int, ...]] = {}
        self._tails: list[tuple[int, ...]] = []
        self._tail_roots: list[int] = []
        self._here: _Token | None = None
        self._trunk: _Token | None = None
        self._by_slot: dict[int, _Token] = {}

    def begin(self, root: int, *, fresh: bool) -> None:
        """At a request's root."""
        window = self._cache.window
        first = 1 + root * window
        self._root_inputs = (NO_INPUT,) * window if fresh else tuple(range(first, first + window))
        self._roots.append(root)
        if fresh:
            self._fresh.append(root)
        self._here = self._trunk = None
        self._by_slot = {}

    def add_kept(self, entry: int, slot: int | None = None) -> None:
        """The next token of the path ran earlier. `slot`: of a guess."""
        self._add(entry, self._cache.first_entry + entry, slot, is_row=False)

    def add_row(self, r: int, slot: int | None = None) -> None:
        """The next token of the path is a row."""
        self._add(r, self._cache.first_row + r, slot, is_row=True)
        self._windows[r] = self._here.inputs[:-1] if self._here else ()

    def _add(self, index: int, own_input: int, slot: int | None, *, is_row: bool) -> None:
        parent = self._here
        before = self._root_inputs if parent is None else parent.inputs[1:]
        depth = 0 if parent is None else parent.level + 1
        if depth == len(self._levels):
            self._levels.append(_OpenLevel())
        level = self._levels[depth]
        tokens = level.rows if is_row else level.kept
        tokens.append((len(self._roots) - 1 if parent is None else parent, index))
        self._parents.append(~self._roots[-1] if parent is None else parent.number)
        self._sources.append(index if is_row else ~index)
        self._here = _Token(depth, len(tokens) - 1, is_row, (*before, own_input), len(self._parents) - 1)
        if slot is not None:
            self._by_slot[slot] = self._here

    def end_trunk(self) -> None:
        """The request's root moves here, where guesses begin."""
        self._trunk = self._here
        if self._here is not None:
            self._levels[self._here.level].ends.append((self._here, self._roots[-1]))
            self._saves.append((self._here.number, self._roots[-1]))
            self._tails.append(self._here.inputs[1:])
            self._tail_roots.append(self._roots[-1])

    def go_to_trunk(self) -> None:
        self._here = self._trunk

    def go_to(self, slot: int) -> bool:
        """Whether the guess in this slot is on a path."""
        if (found := self._by_slot.get(slot)) is None:
            return False
        self._here = found
        return True

    def built(self, guesses: Sequence[int], entries: Sequence[int]) -> StatePass:
        window = self._cache.window
        nothing = (NO_INPUT,) * window
        levels = [] if self._cache.native else zip(self._levels, [None, *self._levels], strict=False)
        return StatePass(
            self._integers(self._roots),
            self._integers(self._fresh),
            [self._level(each, above) for each, above in levels],
            self._order() if self._cache.native else None,
            self._integers([self._windows.get(r, nothing) for r in range(self._padded)]).view(-1, window),
            self._integers(self._tail_roots),
            self._integers(self._tails).view(-1, window),
            self._integers(guesses),
            self._integers(entries),
        )

    def _order(self) -> TokenOrder:
        saves = self._integers(sorted(self._saves)).view(-1, 2)
        rows = len(self._windows)
        return TokenOrder(self._integers(self._parents), self._integers(self._sources), saves, rows)

    def _level(self, level: _OpenLevel, above: _OpenLevel | None) -> Level:
        def position(token: _Token, of: _OpenLevel) -> int:
            return token.index + (len(of.kept) if token.is_row else 0)

        parents = [
            parent if isinstance(parent, int) else position(parent, above)  # type: ignore[arg-type]
            for parent, _ in [*level.kept, *level.rows]
        ]
        return Level(
            self._integers(parents),
            self._integers([entry for _, entry in level.kept]),
            self._integers([r for _, r in level.rows]),
            self._integers([position(token, level) for token, _ in level.ends]),
            self._integers([root for _, root in level.ends]),
        )

    def _integers(self, values: Iterable[int] | Iterable[tuple[int, ...]]) -> Tensor:
        return device_integers(list(values), self._cache.device)
