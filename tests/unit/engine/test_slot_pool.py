"""The slot pool: no slot is ever lost, owned twice, or shared by paths that differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.slot_pool import Block, OutOfSlotsError, SlotPool
from paceline.model.rows import BLOCK_SIZE

SLOTS = 6 * BLOCK_SIZE


@dataclass
class Path:
    """Tokens with slots, the first of them shared."""

    tokens: list[int]
    salt: str = ""
    slots: list[int] = field(default_factory=list)
    shared: list[Block] = field(default_factory=list)


class World:
    """Random requests over one pool, and the salt and path that each slot holds."""

    def __init__(self, seed: int, *, caching: bool = True) -> None:
        self.random = random.Random(seed)
        self.pool = SlotPool(SLOTS, caching=caching)
        self.paths: list[Path] = []
        self.contents: dict[int, tuple[str, list[int]]] = {}
        self.found = self.refused = 0

    def start(self) -> None:
        """Prompts that often begin alike."""
        length = self.random.randint(1, 3 * BLOCK_SIZE)
        path = Path([self.random.random() < 0.02 for _ in range(length)], self.random.choice(["", "", "1"]))
        path.shared = self.pool.match_prefix(path.tokens[:-1], path.salt)
        path.slots = [slot for block in path.shared for slot in block.slots]
        for i, slot in enumerate(path.slots):
            assert self.contents[slot] == (path.salt, path.tokens[: i + 1]), "the cache returned slots of another path"
        self.found += len(path.slots)
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
            self.refused += 1
            return
        assert self.pool.free == free - wanted
        for slot in taken:
            path.slots.append(slot)
            self.contents[slot] = path.salt, path.tokens[: len(path.slots)]

    def finish(self) -> None:
        if not self.paths:
            return
        path = self.paths.pop(self.random.randrange(len(self.paths)))
        self.pool.cache_blocks(path.tokens, path.slots, path.shared, path.salt)
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
    assert caching or not world.found
    assert world.pool.free == SLOTS
    assert sorted(world.pool.allocate(SLOTS)) == list(range(1, SLOTS + 1))


def test_random_requests_share_blocks_and_run_out_of_slots() -> None:
    """Otherwise the test above would prove little."""
    world, most_users = World(seed=1), 0
    for _ in range(300):
        world.random.choice([world.start, world.compute, world.compute, world.finish])()
        most_users = max([most_users, *(block.users for path in world.paths for block in path.shared)])
    assert world.found > 10 * BLOCK_SIZE
    assert world.refused > 5
    assert most_users > 1


def cached_path(pool: SlotPool, tokens: list[int], salt: str = "") -> list[Block]:
    """Compute a path and give it up; return its blocks."""
    slots = pool.allocate(len(tokens))
    shared: list[Block] = []
    pool.cache_blocks(tokens, slots, shared, salt)
    pool.release(slots, shared)
    return shared


def test_a_prefix_is_found_block_by_block() -> None:
    pool = SlotPool(SLOTS)
    tokens = list(range(3 * BLOCK_SIZE))
    blocks = cached_path(pool, tokens)
    assert pool.match_prefix([*tokens[: 2 * BLOCK_SIZE], 99, *tokens[2 * BLOCK_SIZE + 1 :]]) == blocks[:2]
    assert pool.match_prefix(tokens[BLOCK_SIZE:]) == [], "the same tokens after another beginning are another path"


def test_a_salt_counts_for_the_whole_path() -> None:
    """The second block is found through the first. A salt that looks like a block's number finds no block."""
    pool = SlotPool(8 * BLOCK_SIZE)
    tokens = [1] * (2 * BLOCK_SIZE)
    found = {salt: cached_path(pool, tokens, salt) for salt in ("a", "b")}
    assert {salt: pool.match_prefix(tokens, salt) for salt in ("a", "b", "", "c")} == {**found, "": [], "c": []}
    assert not set(found["a"]) & set(found["b"])
    assert pool.match_prefix(tokens, str(found["a"][0].serial)) == []


def test_least_recently_used_blocks_go_first_and_ends_before_beginnings() -> None:
    pool = SlotPool(4 * BLOCK_SIZE)
    old, new = [1] * 2 * BLOCK_SIZE, [2] * 2 * BLOCK_SIZE
    cached_path(pool, old)
    cached_path(pool, new)
    pool.allocate(BLOCK_SIZE)
    assert [len(pool.match_prefix(path)) for path in (new, old)] == [2, 1]


def forget_a_user(pool: SlotPool, own: list[int], block: Block) -> None:
    block.users -= 1


def swap_a_slot(pool: SlotPool, own: list[int], block: Block) -> None:
    own[0] = block.slots[0]


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_a_user,
        swap_a_slot,
        pytest.param(lambda pool, own, block: pool.match_prefix(block.key[1]), id="invent a user"),
        pytest.param(lambda pool, own, block: pool.allocate(1), id="leak"),
        pytest.param(lambda pool, own, block: pool.return_slots(own[:1]), id="give twice"),
        pytest.param(lambda pool, own, block: pool.return_slots(block.slots[:1]), id="give a shared slot"),
    ],
)
def test_corruption_is_detected(corrupt: Callable[[SlotPool, list[int], Block], object]) -> None:
    pool = SlotPool(SLOTS)
    cached_path(pool, [1] * BLOCK_SIZE)
    [block] = pool.match_prefix([1] * BLOCK_SIZE)
    own = pool.allocate(5)
    pool.check_integrity([own], [[block]])
    corrupt(pool, own, block)
    with pytest.raises(AssertionError):
        pool.check_integrity([own], [[block]])
