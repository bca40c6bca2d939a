"""Who owns which slot of the KV cache.

A slot is free, or owned by one request, or part of a *block*: `BLOCK_SIZE` consecutive positions of some path that
requests share. Blocks are found by content (their tokens, and the block before them), so equal prefixes are
computed once; since a row's result does not depend on its company, sharing cannot change a token. Under another *salt*
the same tokens are other blocks: whoever may not know what others ask must not learn it from what is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

BLOCK_SIZE = 16
"""Positions per shared block."""


BlockKey: TypeAlias = tuple[int | str, tuple[int, ...]]
"""What a block is found by: the serial number of the block before it, or, of a first one, the salt; and its tokens."""


class OutOfSlotsError(Exception):
    """Nothing is free and nothing cached can be dropped."""


@dataclass(slots=True, eq=False)
class Block:
    """Slots of `BLOCK_SIZE` positions."""

    serial: int
    key: BlockKey
    slots: tuple[int, ...]
    users: int = 1


class SlotPool:
    """Slots 1 to `slots`, free or taken, and the cache of shared blocks. Not thread-safe."""

    def __init__(self, slots: int, *, caching: bool = True) -> None:
        self.slots = slots
        self._free = list(range(slots, 0, -1))
        self._caching = caching
        self._blocks: dict[BlockKey, Block] = {}
        self._idle: OrderedDict[int, Block] = OrderedDict()  # without users, least recently used first
        self._next_serial = 0

    def emptied(self) -> SlotPool:
        """Another of this kind, with everything free."""
        return SlotPool(self.slots, caching=self._caching)

    @property
    def free(self) -> int:
        """Slots that `take` can hand out, those of idle blocks among them."""
        return len(self._free) + len(self._idle) * BLOCK_SIZE

    def allocate(self, count: int) -> list[int]:
        """`count` slots, dropping idle blocks if need be. Raises `OutOfSlotsError`, and then takes none."""
        if count > self.free:
            raise OutOfSlotsError(f"{count} slots wanted, {self.free} of {self.slots} free")
        while len(self._free) < count:
            _, block = self._idle.popitem(last=False)
            del self._blocks[block.key]
            self._free.extend(block.slots)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def return_slots(self, slots: Iterable[int]) -> None:
        """These slots are not needed any more."""
        self._free.extend(slots)

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """The longest run of known blocks that `tokens` begins with. The caller becomes a user of each."""
        found: list[Block] = []
        before: int | str = salt
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE) if self._caching else ():
            block = self._blocks.get((before, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            self._use(block)
            found.append(block)
            before = block.serial
        return found

    def cache_blocks(self, tokens: Sequence[int], slots: Sequence[int], shared: list[Block], salt: str = "") -> None:
        """Turn the full blocks of a path into shared ones, and extend `shared`, its blocks so far, by them.

        The caller stays their user. A block that another request published meanwhile is left unshared.
        """
        full = len(slots) // BLOCK_SIZE if self._caching else 0
        while len(shared) < full:
            start = len(shared) * BLOCK_SIZE
            key = (shared[-1].serial if shared else salt, tuple(tokens[start : start + BLOCK_SIZE]))
            if key in self._blocks:
                return
            self._next_serial += 1
            self._blocks[key] = Block(self._next_serial, key, tuple(slots[start : start + BLOCK_SIZE]))
            shared.append(self._blocks[key])

    def release(self, slots: Sequence[int], shared: Sequence[Block]) -> None:
        """A path is given up: its first slots are those of its shared blocks, the rest are its own."""
        self.return_slots(slots[len(shared) * BLOCK_SIZE :])
        for block in reversed(shared):  # so that the ends of paths are dropped before their beginnings
            block.users -= 1
            if not block.users:
                self._idle[block.serial] = block

    def check_integrity(self, owned: Iterable[Sequence[int]], shared: Iterable[Sequence[Block]]) -> None:
        """Prove that the books balance, given every path's own slots and its blocks. Raises AssertionError."""
        users: dict[int, int] = {}
        for blocks in shared:
            for block in blocks:
                users[block.serial] = users.get(block.serial, 0) + 1
        held = [slot for block in self._blocks.values() for slot in block.slots]
        everything = sorted([*self._free, *held, *(slot for slots in owned for slot in slots)])
        if everything != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(everything)} slots accounted for, {self.slots} exist, or some twice")
        for block in self._blocks.values():
            if block.users != users.get(block.serial, 0) or (block.users == 0) != (block.serial in self._idle):
                raise AssertionError(f"block {block.serial} says {block.users} users")

    def _use(self, block: Block) -> None:
        if not block.users:
            del self._idle[block.serial]
        block.users += 1
