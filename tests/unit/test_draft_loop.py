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


class LinkEnd:
    """The links' end of the pipe, with the received updates."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.rounds: list[DraftRounds] = []
        self._updates: dict[int, list[DraftUpdate]] = {}
        pipe.on(DraftRounds, self._take)

    def send(self, link: int, *events: RequestEvent) -> None:
        self._pipe.send(LinkEvents(link, events))

    def close_link(self, link: int) -> None:
        self._pipe.send(LinkClosed(link))

    def updates(self, link: int) -> Sequence[DraftUpdate]:
        return self._updates.get(link, [])

    def next(self, link: int) -> DraftUpdate:
        while not self.updates(link):
            count = len(self.rounds)
            self._pipe.receive(WAIT_S)
            assert len(self.rounds) > count, "no round was received"
        return self._updates[link].pop(0)

    def tokens(self, link: int, request_id: int, count: int) -> list[int]:
        """The first `count` draft tokens of a request."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [t for key, growth in self.next(link).growths if key == request_id for t in growth.tokens]
        return tokens

    def _take(self, this: DraftRounds) -> None:
        self.rounds.append(this)
        for link, grown in this.grown:
            self._updates.setdefault(link, []).append(grown)


@contextmanager
def running_loop(speculator: Speculator, *first: LinkEvents | LinkClosed) -> Iterator[tuple[LinkEnd, Future[None]]]:
    """A loop that starts with the messages `first` in its pipe."""
    with ThreadPoolExecutor(1) as threads, pipes() as (ours, theirs):
        for message in first:
            ours.send(message)
        future = threads.submit(DraftLoop(speculator, theirs).run)
        try:
            yield LinkEnd(ours), future
        finally:
            ours.close()
            wait([future], WAIT_S)


def test_links_may_use_the_same_ids() -> None:
    with running_loop(Counting()) as (link_end, _):
        link_end.send(1, opening(1, tokens=[10]))
        link_end.send(2, opening(1, tokens=[20]))
        assert link_end.tokens(1, 1, 3) == [11, 12, 13]
        assert link_end.tokens(2, 1, 3) == [21, 22, 23]


def test_the_speculator_knows_each_requests_link() -> None:
    class Asking(Counting):
        owners: list[int]

        def open(self, opening: Opening) -> None:
            self.owners.append(opening.link)
            super().open(opening)

    asking = Asking()
    asking.owners = []
    with running_loop(asking, *(LinkEvents(link, [opening(1)]) for link in (3, 5, 3))) as (link_end, _):
        link_end.next(5)
    assert asking.owners == [3, 5, 3]


def test_events_are_applied_before_growth_and_counted() -> None:
    events = LinkEvents(1, [opening(1, tokens=[10])]), LinkEvents(1, [Commit(1, 0, [50], 0)])
    with running_loop(Counting(), *events) as (link_end, _):
        grown = link_end.next(1)
        assert grown.applied == 2
        [(_, growth)] = grown.growths
        assert (growth.tokens, growth.base_position) == ([51], 1)


def test_applied_events_are_reported_without_growth() -> None:
    with running_loop(Counting()) as (link_end, _):
        link_end.send(1, RequestClosed(99))
        assert link_end.next(1).applied == 1
        link_end.send(1, Commit(99, 0, [1], 0))
        grown = link_end.next(1)
        assert (grown.applied, list(grown.growths), grown.dropped) == (2, [], {})


def test_only_the_request_that_cannot_be_drafted_is_dropped() -> None:
    events = LinkEvents(1, [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5]), Commit(1, 2, [4], 0)])
    with running_loop(Counting(longest=2), events) as (link_end, _):
        grown = link_end.next(1)
        assert grown.dropped == {1: "longer than 2"}
        assert [key for key, _ in grown.growths] == [2]


def test_a_commit_at_the_wrong_position_drops_the_request() -> None:
    with running_loop(Counting(), LinkEvents(1, [opening(1, tokens=[1, 2, 3]), Commit(1, 7, [4], 0)])) as (link_end, _):
        assert link_end.next(1).dropped == {1: "the root is at 2, the commit at 7"}


def test_closing_a_link_closes_its_requests() -> None:
    endless = LinkEvents(1, [opening(1, tokens=[10], max_depth=2**30)])
    with running_loop(Counting(), endless, LinkClosed(1), LinkEvents(2, [opening(1, tokens=[20])])) as (link_end, _):
        assert link_end.tokens(2, 1, 3) == [21, 22, 23]
        assert link_end.updates(1) == []


def test_every_round_is_reported() -> None:
    events = LinkEvents(1, [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5], max_depth=20)])
    with running_loop(Counting(longest=2), events) as (link_end, _):
        updates = link_end.tokens(1, 2, 20)
        stats = [each for rounds in link_end.rounds for each in rounds.stats]
    assert [(each.nodes, each.dropped) for each in stats[: len(updates)]] == [(1, 1)] + [(1, 0)] * (len(updates) - 1)
    assert len(link_end.rounds) < len(updates)  # several at once
    assert all(each.round_s > 0 for each in stats)


def test_a_bug_in_the_speculator_ends_the_loop() -> None:
    class Broken(Counting):
        def grow(self) -> dict[int, object]:  # type: ignore[override]
            raise ZeroDivisionError

    with running_loop(Broken()) as (link_end, ended):
        link_end.send(1, opening(1))
        with pytest.raises(ZeroDivisionError):
            ended.result(timeout=WAIT_S)


def test_it_ends_when_the_pipe_closes() -> None:
    with running_loop(Counting()) as (link_end, ended):
        link_end.send(1, opening(1, max_depth=2**30))
        link_end.next(1)
    ended.result(timeout=WAIT_S)


def test_first_rounds_are_sent_at_once_then_in_larger_batches() -> None:
    """A frame per round costs more than its content, but a waiting target needs the first rounds at once."""
    with running_loop(Counting()) as (link_end, _):
        link_end.send(1, opening(1, tokens=[10], max_depth=40))
        sizes: list[int] = []
        while sum(sizes) < 40:
            [(_, growth)] = link_end.next(1).growths
            sizes.append(len(growth))
        assert sizes == [1, 2, 2, 2, 3, 5, 7, 11, 7]
        link_end.send(1, Commit(1, 0, [50], 0))
        assert len(link_end.next(1).growths.tokens) == 1, "a committing target may be waiting"


def test_consecutive_growth_of_a_request_is_merged() -> None:
    one, other = TokenTree(0, 0), TokenTree(0, 0)
    first, second = (one.growth([one.add(ROOT, token, -0.5)]) for token in (1, 2))
    foreign = other.growth([other.add(ROOT, 3, -0.5)])
    one.commit([1])
    moved = one.growth([one.add(ROOT, 4, -0.5)])
    pieces = GrowthBatch.of([(1, first), (2, foreign), (1, second), (1, moved)])
    assert [(key, list(growth.tokens)) for key, growth in pieces] == [(1, [1, 2]), (1, [4]), (2, [3])]
