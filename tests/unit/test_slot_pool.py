"""The slot pool: no slot is ever lost, owned twice, or shared by paths that differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.slot_pool import BLOCK_SIZE, Block, OutOfSlotsError, SlotPool

SLOTS = 6 * BLOCK_SIZE


@dataclass
class Path:
    """Tokens with slots, the first of them shared."""

    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    shared: list[Block] = field(default_factory=list)


class World:
    """Random requests over one pool, and the path that each slot holds."""

    def __init__(self, seed: int, *, caching: bool = True) -> None:
        self.random = random.Random(seed)
        self.pool = SlotPool(SLOTS, caching=caching)
        self.paths: list[Path] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    def start(self) -> None:
        """Prompts that often begin alike."""
        length = self.random.randint(1, 3 * BLOCK_SIZE)
        path = Path([self.random.random() < 0.02 for _ in range(length)])
        path.shared = self.pool.match_prefix(path.tokens[:-1])
        path.slots = [slot for block in path.shared for slot in block.slots]
        for i, slot in enumerate(path.slots):
            assert self.contents[slot] == tuple(path.tokens[: i + 1]), "the cache returned slots of another path"
        self.paths.append(path)

    def compute(self) -> None:
        if not self.paths:
            return
        path = self.random.choice(self.paths)
        wanted = self.random.randint(1, BLOCK_SIZE)
        path.tokens += [0] * max(0, len(path.slots) + wanted - len(path.tokens))
        free = self.pool.free
        try:
            taken = self.pool.allocate(wanted)
        except OutOfSlotsError:
            assert wanted > free == self.pool.free
            return
        assert self.pool.free == free - wanted
        for slot in taken:
            path.slots.append(slot)
            self.contents[slot] = tuple(path.tokens[: len(path.slots)])

    def finish(self) -> None:
        if not self.paths:
            return
        path = self.paths.pop(self.random.randrange(len(self.paths)))
        self.pool.cache_blocks(path.tokens, path.slots, path.shared)
        self.pool.release(path.slots, path.shared)

    def check(self) -> None:
        own = [path.slots[len(path.shared) * BLOCK_SIZE :] for path in self.paths]
        self.pool.check_integrity(own, [path.shared for path in self.paths])


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=40, deadline=None)
def test_slots_always_balance(seed: int, caching: bool) -> None:
    world = World(seed, caching=caching)
    for _ in range(100):
        world.random.choice([world.start, world.compute, world.compute, world.finish])()
        world.check()
    while world.paths:
        world.finish()
        world.check()
    assert world.pool.free == SLOTS
    assert sorted(world.pool.allocate(SLOTS)) == list(range(1, SLOTS + 1))


def cached_path(pool: SlotPool, tokens: list[int]) -> list[int]:
    """Compute a path and give it up; return its slots."""
    slots = pool.allocate(len(tokens))
    shared: list[Block] = []
    pool.cache_blocks(tokens, slots, shared)
    pool.release(slots, shared)
    return slots


def test_a_prefix_is_found_block_by_block() -> None:
    pool = SlotPool(SLOTS)
    tokens = list(range(3 * BLOCK_SIZE))
    slots = cached_path(pool, tokens)
    found = pool.match_prefix([*tokens[: 2 * BLOCK_SIZE], 99, *tokens[2 * BLOCK_SIZE + 1 :]])
    assert [slot for block in found for slot in block.slots] == slots[: 2 * BLOCK_SIZE]
    assert pool.match_prefix(tokens[1:]) == [], "the same tokens after another beginning are another path"


def test_requests_share_what_they_use() -> None:
    pool = SlotPool(SLOTS)
    tokens = list(range(BLOCK_SIZE))
    cached_path(pool, tokens)
    one, two = pool.match_prefix(tokens), pool.match_prefix(tokens)
    assert one == two
    assert pool.free == SLOTS - BLOCK_SIZE
    pool.release(one[0].slots, one)
    assert pool.free == SLOTS - BLOCK_SIZE, "the other still uses it"
    pool.release(two[0].slots, two)
    assert pool.free == SLOTS


def test_least_recently_used_blocks_go_first_and_ends_before_beginnings() -> None:
    pool = SlotPool(4 * BLOCK_SIZE)
    old, new = [1] * 2 * BLOCK_SIZE, [2] * 2 * BLOCK_SIZE
    cached_path(pool, old)
    cached_path(pool, new)
    pool.allocate(BLOCK_SIZE)
    assert len(pool.match_prefix(new)) == 2
    assert len(pool.match_prefix(old)) == 1


def test_used_blocks_are_never_dropped() -> None:
    pool = SlotPool(2 * BLOCK_SIZE)
    cached_path(pool, [1] * BLOCK_SIZE)
    [used] = pool.match_prefix([1] * BLOCK_SIZE)
    taken = pool.allocate(BLOCK_SIZE)
    with pytest.raises(OutOfSlotsError, match="1 slots wanted, 0 of 32 free"):
        pool.allocate(1)
    pool.check_integrity([taken], [[used]])


def test_a_block_shared_meanwhile_is_not_shared_twice() -> None:
    pool = SlotPool(SLOTS)
    tokens = [1] * BLOCK_SIZE
    mine, theirs = pool.allocate(BLOCK_SIZE), pool.allocate(BLOCK_SIZE)
    my_blocks: list[Block] = []
    their_blocks: list[Block] = []
    pool.cache_blocks(tokens, mine, my_blocks)
    pool.cache_blocks(tokens, theirs, their_blocks)
    assert (len(my_blocks), len(their_blocks)) == (1, 0)
    pool.release(theirs, their_blocks)
    pool.release(mine, my_blocks)
    assert pool.free == SLOTS
    pool.check_integrity([], [])


def test_without_caching_nothing_is_found() -> None:
    pool = SlotPool(SLOTS, caching=False)
    cached_path(pool, [1] * BLOCK_SIZE)
    assert pool.match_prefix([1] * BLOCK_SIZE) == []


def leak(pool: SlotPool, own: list[int], block: Block) -> None:
    pool.allocate(1)


def give_twice(pool: SlotPool, own: list[int], block: Block) -> None:
    pool.return_slots(own[:1])


def forget_a_user(pool: SlotPool, own: list[int], block: Block) -> None:
    block.users -= 1


def invent_a_user(pool: SlotPool, own: list[int], block: Block) -> None:
    pool.match_prefix(block.key[1])


def give_a_shared_slot(pool: SlotPool, own: list[int], block: Block) -> None:
    pool.return_slots(block.slots[:1])


def swap_a_slot(pool: SlotPool, own: list[int], block: Block) -> None:
    own[0] = block.slots[0]


@pytest.mark.parametrize("corrupt", [leak, give_twice, forget_a_user, invent_a_user, give_a_shared_slot, swap_a_slot])
def test_corruption_is_detected(corrupt: Callable[[SlotPool, list[int], Block], None]) -> None:
    pool = SlotPool(SLOTS)
    cached_path(pool, [1] * BLOCK_SIZE)
    [block] = pool.match_prefix([1] * BLOCK_SIZE)
    own = pool.allocate(5)
    pool.check_integrity([own], [[block]])
    corrupt(pool, own, block)
    with pytest.raises(AssertionError):
        pool.check_integrity([own], [[block]])
