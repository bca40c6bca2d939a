"""The draft worker's loop: many links, one speculator, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from paceline.core.growth import GrowthBatch
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.draft_loop import (
    DraftLoop,
    DraftRounds,
    LinkClosed,
    LinkEvents,
    LinkUpdate,
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
        self.updates: dict[int, list[LinkUpdate]] = {}
        pipe.on(DraftRounds, self._take)

    def send(self, link: int, *events: RequestEvent) -> None:
        self._pipe.send(LinkEvents(link, events))

    def next(self, link: int) -> LinkUpdate:
        while not self.updates.get(link):
            count = len(self.rounds)
            self._pipe.receive(WAIT_S)
            assert len(self.rounds) > count, "no round was received"
        return self.updates[link].pop(0)

    def tokens(self, link: int, request_id: int, count: int) -> list[int]:
        """The first `count` draft tokens of a request."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [t for key, growth in self.next(link).growths if key == request_id for t in growth.tokens]
        return tokens

    def _take(self, this: DraftRounds) -> None:
        self.rounds.append(this)
        for link, grown in this.grown:
            self.updates.setdefault(link, []).append(grown)


@contextmanager
def running_loop(speculator: Speculator, *first: LinkEvents | LinkClosed) -> Iterator[LinkEnd]:
    """A loop that starts with the messages `first` in its pipe, and ends when the pipe closes."""
    with ThreadPoolExecutor(1) as threads, pipes() as (ours, theirs):
        for message in first:
            ours.send(message)
        future = threads.submit(DraftLoop(speculator, theirs).run)
        try:
            yield LinkEnd(ours)
        finally:
            ours.close()
            future.result(WAIT_S)


def test_links_may_use_the_same_ids_and_the_speculator_knows_each_requests_link() -> None:
    owners: list[int] = []

    class Asking(Counting):
        def open(self, opening: Opening) -> None:
            owners.append(opening.link)
            super().open(opening)

    with running_loop(Asking()) as link_end:
        for link in (3, 5):
            link_end.send(link, opening(1, tokens=[10 * link]))
        for link in (3, 5):
            assert link_end.tokens(link, 1, 3) == [10 * link + 1, 10 * link + 2, 10 * link + 3]
    assert owners == [3, 5]


def test_events_are_applied_before_growth_and_counted() -> None:
    events = LinkEvents(1, [opening(1, tokens=[10])]), LinkEvents(1, [Commit(1, 0, [50], 0)])
    with running_loop(Counting(), *events) as link_end:
        grown = link_end.next(1)
        assert grown.applied == 2
        [(_, growth)] = grown.growths
        assert (growth.tokens, growth.base_position) == ([51], 1)


def test_applied_events_are_reported_without_growth() -> None:
    with running_loop(Counting()) as link_end:
        link_end.send(1, RequestClosed(99))
        assert link_end.next(1).applied == 1
        link_end.send(1, Commit(99, 0, [1], 0))
        grown = link_end.next(1)
        assert (grown.applied, list(grown.growths), grown.dropped) == (2, [], {})


def test_only_requests_that_cannot_be_drafted_are_dropped() -> None:
    events = [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5]), Commit(1, 2, [4], 0)]
    events += [opening(3, tokens=[6]), Commit(3, 7, [4], 0)]
    with running_loop(Counting(longest=2), LinkEvents(1, events)) as link_end:
        grown = link_end.next(1)
        assert grown.dropped == {1: "longer than 2", 3: "the root is at 0, the commit at 7"}
        assert [key for key, _ in grown.growths] == [2]


def test_closing_a_link_closes_its_requests() -> None:
    endless = LinkEvents(1, [opening(1, tokens=[10], max_depth=2**30)])
    with running_loop(Counting(), endless, LinkClosed(1), LinkEvents(2, [opening(1, tokens=[20])])) as link_end:
        assert link_end.tokens(2, 1, 3) == [21, 22, 23]
        assert 1 not in link_end.updates


def test_every_round_is_reported() -> None:
    events = LinkEvents(1, [opening(1, tokens=[1, 2, 3]), opening(2, tokens=[5], max_depth=20)])
    with running_loop(Counting(longest=2), events) as link_end:
        link_end.tokens(1, 2, 20)
        stats = [each for rounds in link_end.rounds for each in rounds.stats]
    assert [(each.nodes, each.dropped) for each in stats[:20]] == [(1, 1)] + [(1, 0)] * 19
    assert len(link_end.rounds) < 20, "several at once"
    assert all(each.round_s > 0 for each in stats)


def test_first_rounds_are_sent_at_once_then_in_larger_batches() -> None:
    """A frame per round costs more than its content, but a waiting target needs the first rounds at once."""
    with running_loop(Counting()) as link_end:
        link_end.send(1, opening(1, tokens=[10], max_depth=40))
        sizes: list[int] = []
        while sum(sizes) < 40:
            sizes.append(len(link_end.next(1).growths.tokens))
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
