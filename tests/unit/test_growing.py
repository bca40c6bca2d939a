"""The draft worker's loop: many links, one speculator, one thread."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from paceline.speculators.base import Commit
from paceline.speculators.growing import Close, GrowingLoop, Grown, Link
from paceline.telemetry.round import RoundStats
from tests.workers import Counting, opening

WAIT_S = 20.0


class Peer:
    """A link, and everything that was delivered on it."""

    def __init__(self, loop: GrowingLoop) -> None:
        self._delivered: SimpleQueue[Grown] = SimpleQueue()
        self.link: Link = loop.attach(self._delivered.put)

    def heard_nothing(self) -> bool:
        return self._delivered.empty()

    def next(self) -> Grown:
        return self._delivered.get(timeout=WAIT_S)

    def tokens(self, request_id: int, count: int) -> list[int]:
        """The first `count` tokens guessed for a request."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [token for key, growth in self.next().growths if key == request_id for token in growth.tokens]
        return tokens


@contextmanager
def running(loop: GrowingLoop) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(loop.run)
        try:
            yield future
        finally:
            loop.stop()


def test_links_choose_ids_freely() -> None:
    loop = GrowingLoop(Counting())
    here, there = Peer(loop), Peer(loop)
    here.link.say([opening(1, tokens=[10])])
    there.link.say([opening(1, tokens=[20])])
    with running(loop):
        assert here.tokens(1, 3) == [11, 12, 13]
        assert there.tokens(1, 3) == [21, 22, 23]


def test_what_was_said_is_applied_before_growing_and_counted() -> None:
    loop = GrowingLoop(Counting())
    peer = Peer(loop)
    peer.link.say([opening(1, tokens=[10])])
    peer.link.say([Commit(1, 0, [50], 0)])
    with running(loop):
        grown = peer.next()
        assert grown.applied == 2
        assert grown.growths[0][1].tokens == [51]
        assert grown.growths[0][1].base_position == 1


def test_applying_is_told_even_if_nothing_grew() -> None:
    loop = GrowingLoop(Counting())
    peer = Peer(loop)
    with running(loop):
        peer.link.say([Close(99)])
        assert peer.next().applied == 1
        peer.link.say([Commit(99, 0, [1], 0)])
        grown = peer.next()
        assert (grown.applied, grown.growths, grown.dropped) == (2, [], {})


def test_a_request_that_cannot_be_drafted_is_dropped_alone() -> None:
    loop = GrowingLoop(Counting(longest=2))
    peer = Peer(loop)
    peer.link.say([opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5]), Commit(1, 2, [4], 0)])
    with running(loop):
        grown = peer.next()
        assert grown.dropped == {1: "longer than 2"}
        assert [key for key, _ in grown.growths] == [2]


def test_a_commit_at_the_wrong_place_drops_the_request() -> None:
    loop = GrowingLoop(Counting())
    peer = Peer(loop)
    peer.link.say([opening(1, tokens=[1, 2, 3]), Commit(1, 7, [4], 0)])
    with running(loop):
        assert peer.next().dropped == {1: "the root is at 2, the commit at 7"}


def test_a_link_that_leaves_takes_its_requests_along() -> None:
    loop = GrowingLoop(Counting())
    leaving, staying = Peer(loop), Peer(loop)
    leaving.link.say([opening(1, tokens=[10], max_depth=2**30)])
    leaving.link.leave()
    staying.link.say([opening(1, tokens=[20])])
    with running(loop):
        assert staying.tokens(1, 3) == [21, 22, 23]
    assert leaving.heard_nothing()


def test_every_round_is_observed() -> None:
    rounds: SimpleQueue[RoundStats] = SimpleQueue()
    loop = GrowingLoop(Counting(longest=2), rounds.put)
    peer = Peer(loop)
    peer.link.say([opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5])])
    with running(loop):
        first = rounds.get(timeout=WAIT_S)
    assert (first.nodes, first.dropped) == (1, 1)
    assert first.round_s > 0


def test_a_bug_in_the_speculator_ends_the_loop() -> None:
    class Broken(Counting):
        def grow(self) -> dict[int, object]:  # type: ignore[override]
            raise ZeroDivisionError

    loop = GrowingLoop(Broken())
    peer = Peer(loop)
    peer.link.say([opening(1)])
    with running(loop) as ended, pytest.raises(ZeroDivisionError):
        ended.result(timeout=WAIT_S)
