"""The draft worker's loop: many links, one speculator, one thread."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from paceline.core.growth import GrowthBatch
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.draft_loop import (
    DraftLoop,
    DraftRounds,
    DraftUpdate,
    LinkClosed,
    LinkEvents,
    RequestClosed,
    RequestEvent,
)
from paceline.drafting.speculator import Commit, Opening, Speculator
from paceline.ipc.pipe import Pipe
from tests.helpers.pipes import pipes
from tests.helpers.workers import Counting, opening

WAIT_S = 20.0


class Peer:
    """The links' end of the pipe, and what came through it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.rounds: list[DraftRounds] = []
        self._heard: dict[int, list[DraftUpdate]] = {}
        pipe.on(DraftRounds, self._take)

    def say(self, link: int, *said: RequestEvent) -> None:
        self._pipe.send(LinkEvents(link, said))

    def leave(self, link: int) -> None:
        self._pipe.send(LinkClosed(link))

    def heard(self, link: int) -> Sequence[DraftUpdate]:
        return self._heard.get(link, [])

    def next(self, link: int) -> DraftUpdate:
        while not self.heard(link):
            count = len(self.rounds)
            self._pipe.receive(WAIT_S)
            assert len(self.rounds) > count, "nothing came"
        return self._heard[link].pop(0)

    def tokens(self, link: int, request_id: int, count: int) -> list[int]:
        """The first `count` tokens guessed for a request."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [t for key, growth in self.next(link).growths if key == request_id for t in growth.tokens]
        return tokens

    def _take(self, this: DraftRounds) -> None:
        self.rounds.append(this)
        for link, grown in this.grown:
            self._heard.setdefault(link, []).append(grown)


@contextmanager
def growing(speculator: Speculator, *first: LinkEvents | LinkClosed) -> Iterator[tuple[Peer, Future[None]]]:
    """A loop that finds `first` in its pipe when it starts."""
    with ThreadPoolExecutor(1) as threads, pipes() as (ours, theirs):
        for message in first:
            ours.send(message)
        future = threads.submit(DraftLoop(speculator, theirs).run)
        try:
            yield Peer(ours), future
        finally:
            ours.close()
            wait([future], WAIT_S)


def test_links_choose_ids_freely() -> None:
    with growing(Counting()) as (peer, _):
        peer.say(1, opening(1, tokens=[10]))
        peer.say(2, opening(1, tokens=[20]))
        assert peer.tokens(1, 1, 3) == [11, 12, 13]
        assert peer.tokens(2, 1, 3) == [21, 22, 23]


def test_the_speculator_knows_whose_a_request_is() -> None:
    class Asking(Counting):
        owners: list[int]

        def open(self, opening: Opening) -> None:
            self.owners.append(opening.link)
            super().open(opening)

    asking = Asking()
    asking.owners = []
    with growing(asking, *(LinkEvents(link, [opening(1)]) for link in (3, 5, 3))) as (peer, _):
        peer.next(5)
    assert asking.owners == [3, 5, 3]


def test_what_was_said_is_applied_before_growing_and_counted() -> None:
    said = LinkEvents(1, [opening(1, tokens=[10])]), LinkEvents(1, [Commit(1, 0, [50], 0)])
    with growing(Counting(), *said) as (peer, _):
        grown = peer.next(1)
        assert grown.applied == 2
        [(_, growth)] = grown.growths
        assert (growth.tokens, growth.base_position) == ([51], 1)


def test_applying_is_told_even_if_nothing_grew() -> None:
    with growing(Counting()) as (peer, _):
        peer.say(1, RequestClosed(99))
        assert peer.next(1).applied == 1
        peer.say(1, Commit(99, 0, [1], 0))
        grown = peer.next(1)
        assert (grown.applied, list(grown.growths), grown.dropped) == (2, [], {})


def test_a_request_that_cannot_be_drafted_is_dropped_alone() -> None:
    said = LinkEvents(1, [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5]), Commit(1, 2, [4], 0)])
    with growing(Counting(longest=2), said) as (peer, _):
        grown = peer.next(1)
        assert grown.dropped == {1: "longer than 2"}
        assert [key for key, _ in grown.growths] == [2]


def test_a_commit_at_the_wrong_place_drops_the_request() -> None:
    with growing(Counting(), LinkEvents(1, [opening(1, tokens=[1, 2, 3]), Commit(1, 7, [4], 0)])) as (peer, _):
        assert peer.next(1).dropped == {1: "the root is at 2, the commit at 7"}


def test_a_link_that_leaves_takes_its_requests_along() -> None:
    endless = LinkEvents(1, [opening(1, tokens=[10], max_depth=2**30)])
    with growing(Counting(), endless, LinkClosed(1), LinkEvents(2, [opening(1, tokens=[20])])) as (peer, _):
        assert peer.tokens(2, 1, 3) == [21, 22, 23]
        assert peer.heard(1) == []


def test_every_round_is_told() -> None:
    said = LinkEvents(1, [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5], max_depth=20)])
    with growing(Counting(longest=2), said) as (peer, _):
        heard = peer.tokens(1, 2, 20)
        stats = [each for rounds in peer.rounds for each in rounds.stats]
    assert [(each.nodes, each.dropped) for each in stats[: len(heard)]] == [(1, 1)] + [(1, 0)] * (len(heard) - 1)
    assert len(peer.rounds) < len(heard)  # several at once
    assert all(each.round_s > 0 for each in stats)


def test_a_bug_in_the_speculator_ends_the_loop() -> None:
    class Broken(Counting):
        def grow(self) -> dict[int, object]:  # type: ignore[override]
            raise ZeroDivisionError

    with growing(Broken()) as (peer, ended):
        peer.say(1, opening(1))
        with pytest.raises(ZeroDivisionError):
            ended.result(timeout=WAIT_S)


def test_it_ends_when_nobody_is_left_to_hear_it() -> None:
    with growing(Counting()) as (peer, ended):
        peer.say(1, opening(1, max_depth=2**30))
        peer.next(1)
    ended.result(timeout=WAIT_S)


def test_rounds_go_out_at_once_and_then_in_growing_pieces() -> None:
    """A frame a round would cost more than what it carries; a target that waits needs the first ones."""
    with growing(Counting()) as (peer, _):
        peer.say(1, opening(1, tokens=[10], max_depth=40))
        sizes: list[int] = []
        while sum(sizes) < 40:
            [(_, growth)] = peer.next(1).growths
            sizes.append(len(growth))
        assert sizes == [1, 2, 2, 2, 3, 5, 7, 11, 7]
        peer.say(1, Commit(1, 0, [50], 0))
        assert len(peer.next(1).growths.tokens) == 1, "whoever commits may be waiting"


def test_pieces_of_one_tree_are_joined_and_others_are_not() -> None:
    one, other = TokenTree(0, 0), TokenTree(0, 0)
    first, second = (one.growth([one.add(ROOT, token, -0.5)]) for token in (1, 2))
    foreign = other.growth([other.add(ROOT, 3, -0.5)])
    one.commit([1])
    moved = one.growth([one.add(ROOT, 4, -0.5)])
    pieces = GrowthBatch.of([(1, first), (2, foreign), (1, second), (1, moved)])
    assert [(key, list(growth.tokens)) for key, growth in pieces] == [(1, [1, 2]), (1, [4]), (2, [3])]
