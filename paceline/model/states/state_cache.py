"""States of requests' paths: where each pass finds a row's past, and what it keeps for the next one.

A layer that keeps a state has read every token of a path once, in order. A request has one state per layer, at its
*root*: after all its committed tokens whose rows have run. A row's own state is computed in passing, from the root
along the row's path. Of a guess only the inputs of its update are kept. The next pass, in which the request's slot
table tells what was accepted, advances the root by these inputs: no weight is read for that, and nothing is undone
for a guess that was refused.

So a state's sums follow from its path alone, token by token: they do not depend on chunks of the prompt, on other rows
of a pass, or on what was guessed.

A *snapshot* is a state that stays where a request was at the end of a block: another path with the same slots begins
there. It is found by the block's last slot until that slot is written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from paceline.model.rows import BLOCK_SIZE, Row, SlotTable, device_integers

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
    saved: Tensor
    """Into this level: tokens after which the state is kept."""
    saved_states: Tensor
    """Where: into the states."""


class TokenOrder(NamedTuple):
    """The same tokens for native code, each after its parent. A token begins at a state as it was before the pass."""

    parents: Tensor
    """A token, or ~ the index of the state where a path begins."""
    sources: Tensor
    """A row, or ~ the index of kept inputs."""
    saves: Tensor
    """[n, 2], by token: a token, and the state that it replaces."""


@dataclass(frozen=True, slots=True)
class StatePass:
    """One pass through the states. All tensors are int64 on the device.

    levels: the tokens for torch's operators; empty for native code. order: the tokens for native code, else None. roots
    [T]: the states with which paths begin. fresh: those of them that are zero. windows [R, M]: for each row, where a
    convolution's memory has the inputs of the M tokens before it. tails [T', M]: the same for the token that follows
    each of `tail_states` [T']. guesses, entries [G]: rows whose inputs are kept, and where.
    """

    roots: Tensor
    fresh: Tensor
    levels: Sequence[Level]
    order: TokenOrder | None
    windows: Tensor
    tail_states: Tensor
    tails: Tensor
    guesses: Tensor
    entries: Tensor


class StateCache:
    """Which request has which state, and where the inputs of guesses are, and snapshots. The numbers are kept by
    `paceline.model.states.stored_states`: the requests' states first, then snapshots."""

    def __init__(
        self,
        requests: int,
        guesses: int,
        window: int,
        device: torch.device,
        *,
        snapshots: int = 0,
        interval: int = BLOCK_SIZE,
        native: bool = False,
    ) -> None:
        """`requests`, `guesses`, `snapshots`: as many states, inputs of guesses, and snapshots are kept. `window`: M,
        the tokens before its own that the longest convolution reads. `interval`: tokens between snapshots.
        `native`: whether native code computes the passes."""
        self.requests, self.guesses, self.window, self.device = requests, guesses, window, device
        self.snapshots, self.interval, self.native = snapshots, interval, native
        self.reruns_accepted = False
        """Whether a request's accepted guesses run once more, as committed tokens. Else its slot table tells them."""
        self._roots: WeakKeyDictionary[SlotTable, int] = WeakKeyDictionary()
        self._entries: OrderedDict[int, int] = OrderedDict()
        """By slot, the oldest first."""
        self._snapshots: OrderedDict[int, int] = OrderedDict()
        """By the slot of the last token that was read, the least recently used first."""
        self._taken: set[int] = set()
        """Slots of the snapshots that the last pass takes."""
        self._guessed: WeakSet[SlotTable] = WeakSet()
        """Tables after which the last passes had guesses."""

    @property
    def states(self) -> int:
        """Of requests, and snapshots."""
        return self.requests + self.snapshots

    @property
    def first_entry(self) -> int:
        """Of kept inputs, in a convolution's memory: NO_INPUT, then M of each state, then these, then the rows."""
        return 1 + self.states * self.window

    @property
    def first_row(self) -> int:
        return self.first_entry + self.guesses

    def keeps_inputs(self, slot: int) -> bool:
        """Of the guess in this slot, so that others can run below it."""
        return slot in self._entries

    def prefix_length(self, slots: Sequence[int]) -> int:
        """How many tokens of a path a request can begin after, given the slots of all."""
        last = len(slots) // BLOCK_SIZE * BLOCK_SIZE
        return next((n for n in range(last, 0, -BLOCK_SIZE) if slots[n - 1] in self._snapshots), 0)

    def paths(self, rows: Sequence[Row], padded: int) -> StatePass:
        """That of the next pass, `padded` rows long. Raises `StateLostError`, or ValueError if there are more requests
        or guesses than the cache has room for."""
        guesses = [r for r, row in enumerate(rows) if row.branch]
        if len(guesses) > self.guesses:
            raise ValueError(f"a pass of {len(guesses)} guesses: states are kept for {self.guesses}")
        for row in rows:
            self._snapshots.pop(row.slot, None)  # after an earlier token in this slot
        members = _by_request(rows)
        self._taken.clear()
        for each in members:
            self._find_origin(each)  # all of them before any snapshot gives way to another
        paths = _Paths(self, padded)
        running = {each.table for each in members}
        for table in [each for each in self._guessed if each not in running and not self.reruns_accepted]:
            if 0 < table.rooted < len(table):  # its guesses were verified, and it does not run in this pass
                self._read_trunk(paths, _Member(table, len(table), read=table.rooted))
        for each in members:
            self._read_trunk(paths, each)
            for r, row in each.guesses:
                self._branch(paths, r, row)
        self._guessed = WeakSet(each.table for each in members if each.guesses)
        return paths.built(guesses, self._new_entries([row.slot for row in rows], [rows[r].slot for r in guesses]))

    def _find_origin(self, member: _Member) -> None:
        """Where the request's path begins in this pass: after what its state has read, or a snapshot, or at zero."""
        table = member.table
        if member.start < table.rooted:
            table.rooted = 0
        member.read = table.rooted
        if not table.rooted and (length := self.prefix_length(table.slots[: member.start])):
            slot = table.slots[length - 1]
            self._snapshots.move_to_end(slot)
            member.read, member.snapshot = length, self._snapshots[slot]

    def _read_trunk(self, paths: _Paths, member: _Member) -> None:
        """The request's committed tokens from where its path begins. Its state moves to the end, where guesses
        begin."""
        if self.reruns_accepted and member.read < member.start:
            raise StateLostError("tokens before a row are not in its request's state")
        own = self._root(member.table)
        paths.begin(own if member.snapshot is None else member.snapshot, fresh=not member.read)
        saved = self._positions_to_save(member)
        for position in range(member.read, member.stop):
            slot = member.table.slots[position]
            if position < member.start:
                paths.add_kept(self._entry(slot))
            else:
                paths.add_row(member.committed[position - member.start])
            if position + 1 in saved and (snapshot := self._new_snapshot(slot)) is not None:
                paths.save(snapshot)
        paths.save(own)
        paths.end_trunk()
        member.table.rooted = member.stop

    def _positions_to_save(self, member: _Member) -> set[int]:
        """After how many tokens of the trunk snapshots are taken: at each interval, and at the last end of a block if
        at least a block runs, as in a prompt."""
        if not self.snapshots:
            return set()
        found = {*range(member.read // self.interval * self.interval, member.stop + 1, self.interval)}
        if len(member.committed) >= BLOCK_SIZE:
            found.add(member.stop // BLOCK_SIZE * BLOCK_SIZE)
        return {each for each in found if each > member.read}

    def _new_snapshot(self, slot: int) -> int | None:
        """Where the state goes after the token in this slot: in place of the snapshot that was not used for longest.
        None: this pass has taken all of them."""
        used = {*self._snapshots.values()}
        index = next((n for n in range(self.requests, self.states) if n not in used), None)
        if index is None:
            oldest = next(iter(self._snapshots))
            if oldest in self._taken:
                return None
            index = self._snapshots.pop(oldest)
        self._snapshots[slot] = index
        self._taken.add(slot)
        return index

    def _branch(self, paths: _Paths, r: int, row: Row) -> None:
        paths.go_to_trunk()
        for slot in row.branch[:-1]:
            if not paths.go_to(slot):
                paths.add_kept(self._entry(slot), slot)
        paths.add_row(r, row.slot)

    def _entry(self, slot: int) -> int:
        if not self.keeps_inputs(slot):
            raise StateLostError("tokens before a row are not in its request's state")
        return self._entries[slot]

    def _new_entries(self, written: Sequence[int], guessed: Sequence[int]) -> list[int]:
        """For the inputs of guesses, given the slots of a pass' rows."""
        for slot in written:
            self._entries.pop(slot, None)  # of an earlier guess there
        used = set(self._entries.values())
        free = (entry for entry in range(self.guesses) if entry not in used)
        found: list[int] = []
        for slot in guessed:
            entry = next(free, None)
            if entry is None:
                _, entry = self._entries.popitem(last=False)
            self._entries[slot] = entry
            found.append(entry)
        return found

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

    def check_integrity(self, tables: Iterable[SlotTable]) -> None:
        """Raises AssertionError unless every state, snapshot and entry of a guess has one owner, and states belong to
        these tables alone, in which their tokens are."""
        owned = set(tables)
        for table in self._roots:
            if table.rooted and (table not in owned or table.rooted > len(table)):
                raise AssertionError(f"a state after {table.rooted} tokens belongs to no request that has them")
        for name, indices, allowed in (
            ("states", [*self._roots.values()], range(self.requests)),
            ("snapshots", [*self._snapshots.values()], range(self.requests, self.states)),
            ("inputs of guesses", [*self._entries.values()], range(self.guesses)),
        ):
            if len(set(indices)) != len(indices) or not {*indices} <= {*allowed}:
                raise AssertionError(f"of {len(allowed)} {name} some have two owners: {sorted(indices)}")


@dataclass(slots=True)
class _Member:
    """A request in a pass."""

    table: SlotTable
    start: int
    """The position of its first committed row, or of its first guess."""
    committed: list[int] = field(default_factory=list)
    """Rows by position, from `start` on."""
    guesses: list[tuple[int, Row]] = field(default_factory=list)
    read: int = 0
    """Tokens before its path begins in this pass."""
    snapshot: int | None = None
    """The state with which it begins there. None: its own."""

    @property
    def stop(self) -> int:
        return self.start + len(self.committed)


def _by_request(rows: Sequence[Row]) -> list[_Member]:
    """Raises `StateLostError` if a request's rows leave out tokens."""
    found: dict[SlotTable, list[tuple[int, Row]]] = {}
    for r, row in enumerate(rows):
        found.setdefault(row.slot_table, []).append((r, row))
    members: list[_Member] = []
    for table, own in found.items():
        committed = sorted((row.position, r) for r, row in own if not row.branch)
        guesses = [(r, row) for r, row in own if row.branch]
        start = committed[0][0] if committed else guesses[0][1].length
        member = _Member(table, start, [r for _, r in committed], guesses)
        positions = [position for position, _ in committed]
        if positions != [*range(start, member.stop)] or any(row.length != member.stop for _, row in guesses):
            raise StateLostError("rows of one request leave out tokens of its path")
        members.append(member)
    return members


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
    saved: list[tuple[_Token, int]] = field(default_factory=list)
    """And the state after it."""


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
        self._tail_states: list[int] = []
        self._here: _Token | None = None
        self._trunk: _Token | None = None
        self._by_slot: dict[int, _Token] = {}

    def begin(self, state: int, *, fresh: bool) -> None:
        """With this state, or zero in its place."""
        window = self._cache.window
        first = 1 + state * window
        self._first_inputs = (NO_INPUT,) * window if fresh else tuple(range(first, first + window))
        self._roots.append(state)
        if fresh:
            self._fresh.append(state)
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
        before = self._first_inputs if parent is None else parent.inputs[1:]
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

    def save(self, state: int) -> None:
        """Keep the state after this token there."""
        if self._here is not None:
            self._levels[self._here.level].saved.append((self._here, state))
            self._saves.append((self._here.number, state))
            self._tails.append(self._here.inputs[1:])
            self._tail_states.append(state)

    def end_trunk(self) -> None:
        """Guesses begin here."""
        self._trunk = self._here

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
            self._integers(self._tail_states),
            self._integers(self._tails).view(-1, window),
            self._integers(guesses),
            self._integers(entries),
        )

    def _order(self) -> TokenOrder:
        saves = self._integers(sorted(self._saves)).view(-1, 2)
        return TokenOrder(self._integers(self._parents), self._integers(self._sources), saves)

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
            self._integers([position(token, level) for token, _ in level.saved]),
            self._integers([state for _, state in level.saved]),
        )

    def _integers(self, values: Iterable[int] | Iterable[tuple[int, ...]]) -> Tensor:
        return device_integers(list(values), self._cache.device)
