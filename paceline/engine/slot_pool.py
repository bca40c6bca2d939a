"""Ownership of the KV cache's slots, and the prefix cache.

A slot is free, owned by one request, or part of a *block*: `BLOCK_SIZE` consecutive positions of a path that requests
share. Blocks are found by their tokens and the block before them, so equal prefixes are computed once. Sharing cannot
change a token, since a row's result does not depend on other rows. Under another *salt* the same tokens are other
blocks: cache hits do not reveal the prompts of other salts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.model.rows import BLOCK_SIZE

BlockKey: TypeAlias = tuple[int | str, tuple[int, ...]]
"""The serial number of the block before, or the salt for a first block; and the block's tokens."""


class OutOfSlotsError(Exception):
    """Not enough slots are free, even without the cached blocks."""


@dataclass(slots=True, eq=False)
class Block:
    """The slots of `BLOCK_SIZE` shared positions."""

    serial: int
    key: BlockKey
    slots: tuple[int, ...]
    users: int = 1


class SlotPool:
    """Slots 1 to `slots`, and the cache of shared blocks. Not thread-safe."""

    def __init__(
        self, slots: int, *, caching: bool = True, prefix_length: Callable[[Sequence[int]], int] | None = None
    ) -> None:
        """`prefix_length`: how many tokens of a path a request can begin after, given their slots; a multiple of
        BLOCK_SIZE. None: all."""
        self.slots = slots
        self._free = list(range(slots, 0, -1))
        self._caching, self._prefix_length = caching, prefix_length
        self._blocks: dict[BlockKey, Block] = {}
        self._idle: OrderedDict[int, Block] = OrderedDict()  # without users, least recently used first
        self._next_serial = 0

    def emptied(self) -> SlotPool:
        """A new pool of the same size, with all slots free."""
        return SlotPool(self.slots, caching=self._caching, prefix_length=self._prefix_length)

    @property
    def free(self) -> int:
        """Slots that `allocate` can return, those of idle blocks included."""
        return len(self._free) + len(self._idle) * BLOCK_SIZE

    def allocate(self, count: int) -> list[int]:
        """`count` slots; idle blocks are dropped if necessary. Raises `OutOfSlotsError`, and then takes none."""
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
        """Free slots outside shared blocks."""
        self._free.extend(slots)

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """The cached blocks that `tokens` begins with, as far as a request can begin after them. The caller becomes a
        user of each."""
        found: list[Block] = []
        before: int | str = salt
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE) if self._caching else ():
            block = self._blocks.get((before, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            found.append(block)
            before = block.serial
        if self._prefix_length is not None:
            del found[self._prefix_length([slot for block in found for slot in block.slots]) // BLOCK_SIZE :]
        for block in found:
            self._use(block)
        return found

    def cache_blocks(self, tokens: Sequence[int], slots: Sequence[int], shared: list[Block], salt: str = "") -> None:
        """Share the full blocks of a path; `shared`, its blocks so far, is extended by them.

        The caller stays their user. Stops at a block that another request has shared meanwhile.
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
        """Give up a path. Its first slots belong to its shared blocks, the others are its own."""
        self.return_slots(slots[len(shared) * BLOCK_SIZE :])
        for block in reversed(shared):  # ends of paths are dropped before their beginnings
            block.users -= 1
            if not block.users:
                self._idle[block.serial] = block

    def check_integrity(self, owned: Iterable[Sequence[int]], shared: Iterable[Sequence[Block]]) -> None:
        """Verify that each slot has one owner, given all paths' own slots and blocks. Raises AssertionError."""
        users: dict[int, int] = {}
        for blocks in shared:
            for block in blocks:
                users[block.serial] = users.get(block.serial, 0) + 1
        held = [slot for block in self._blocks.values() for slot in block.slots]
        everything = sorted([*self._free, *held, *(slot for slots in owned for slot in slots)])
        if everything != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(everything)} of {self.slots} slots have an owner, or some have two")
        for block in self._blocks.values():
            if block.users != users.get(block.serial, 0) or (block.users == 0) != (block.serial in self._idle):
                raise AssertionError(f"block {block.serial} counts {block.users} users")

    def _use(self, block: Block) -> None:
        if not block.users:
            del self._idle[block.serial]
        block.users += 1
