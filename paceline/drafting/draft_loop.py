"""The draft worker's loop: owns a speculator and grows trees for many links.

    take in what the links said → grow, one round → hand out the new nodes

A link is one target. What it says comes through the pipe at any time, and waits for nothing. When no open request is
worth another guess, the loop sleeps until somebody says something.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.core.growth import Growth, GrowthBatch
from paceline.core.messages import Timings
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator
from paceline.ipc.pipe import Pipe, PipeClosedError
from paceline.telemetry.round_stats import RoundStats


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """The target needs no more guesses for this request."""

    request_id: int


RequestEvent = Opening | Context | Commit | Limit | RequestClosed


@dataclass(slots=True)
class DraftUpdate:
    """What rounds of the loop have for one link: nodes by request, requests that cannot be drafted and why.

    `applied` counts how often the link said something (`LinkEvents`) that the speculator has heard.
    """

    growths: GrowthBatch = field(default_factory=GrowthBatch)
    dropped: dict[int, str] = field(default_factory=dict)
    applied: int = 0
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """To the loop: a link says this, to be applied in this order before anything grows."""

    link: int
    events: Sequence[RequestEvent]
    received_at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """To the loop: a link has ended, and with it all its requests. A delivery that is under way may still come."""

    link: int


@dataclass(frozen=True, slots=True)
class DraftRounds:
    """From the loop: so many rounds were made. `grown` has something for each link that it concerns."""

    stats: Sequence[RoundStats]
    grown: Sequence[tuple[int, DraftUpdate]]


@dataclass(frozen=True, slots=True)
class SpeculatorFacts:
    """What links have to know of the speculator, see there."""

    method: str
    model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    hidden_state_layers: Sequence[int]
    position_limit: int

    @classmethod
    def of(cls, speculator: Speculator) -> SpeculatorFacts:
        return cls(
            speculator.method,
            speculator.model,
            speculator.vocabulary_fingerprint,
            speculator.vocabulary_size,
            tuple(speculator.hidden_state_layers),
            speculator.position_limit,
        )


@dataclass(slots=True)
class _LinkState:
    """One target's requests."""

    number: int
    requests: dict[int, int] = field(default_factory=dict)
    """The speculator's ids by the link's."""
    update: DraftUpdate = field(default_factory=DraftUpdate)
    growths: list[tuple[int, Growth]] = field(default_factory=list)
    """What is not told yet."""
    rounds: int = 0
    """Made since the link last said something."""
    report_after_rounds: int = 1
    """After so many, what there is of news goes out."""

    def report_due(self) -> bool:
        """Count a round. News goes out after 1, 3, 5, 7, 10, 15, ... of them: at once where a target may be waiting,
        and by and by in larger pieces, when it is busy and each frame costs more than what it carries."""
        self.rounds += 1
        if self.rounds < self.report_after_rounds:
            return False
        self.report_after_rounds = self.rounds + max(2, self.rounds // 2)
        return True


class DraftLoop:
    """Grows until the pipe closes; what it did is told as `DraftRounds`."""

    def __init__(self, speculator: Speculator, pipe: Pipe, clock: Callable[[], float] = time.perf_counter) -> None:
        self._speculator = speculator
        self._clock = clock
        self._pipe = pipe
        self._inbox: deque[LinkEvents | LinkClosed] = deque()
        pipe.on(LinkEvents, self._inbox.append)
        pipe.on(LinkClosed, self._inbox.append)
        self._links: dict[int, _LinkState] = {}
        self._owners: dict[int, tuple[_LinkState, int]] = {}  # by the speculator's id: the link, and its id there
        self._next_id = 1
        self._dropped = 0
        self._stats: list[RoundStats] = []
        """Of rounds that are not told yet."""
        self._began = 0.0
        """This round: when somebody spoke, or when the last one had been written."""

    def run(self) -> None:
        """Return when the pipe is closed. Errors of the speculator other than `DraftError` end the loop."""
        idle = True
        with suppress(PipeClosedError):
            while True:
                self._pipe.receive(None if idle else 0.0)
                if idle:
                    self._began = self._clock()
                heard, queue_s = self._take_in()
                began = self._clock()
                grown = self._speculator.grow()
                compute_s = self._clock() - began
                idle = not grown and not self._speculator.behind
                self._hand_out(grown, heard, Timings(queue_s, compute_s, queue_s + compute_s), last=idle)

    def _take_in(self) -> tuple[dict[int, _LinkState], float]:
        """Apply what has been said; return who said it, and how long the oldest of it waited, in seconds."""
        heard: dict[int, _LinkState] = {}
        queue_s = 0.0
        while self._inbox:
            mail = self._inbox.popleft()
            if isinstance(mail, LinkClosed):
                self._forget(mail.link)
                heard.pop(mail.link, None)
            else:
                queue_s = max(queue_s, self._clock() - mail.received_at)
                link = heard[mail.link] = self._links.setdefault(mail.link, _LinkState(mail.link))
                self._apply(link, mail.events)
        return heard, queue_s

    def _apply(self, link: _LinkState, said: Sequence[RequestEvent]) -> None:
        link.update.applied += 1
        for each in said:
            try:
                self._apply_event(link, each)
            except DraftError as error:
                self._close(link, each.request_id)
                link.update.dropped[each.request_id] = str(error)
                self._dropped += 1

    def _apply_event(self, link: _LinkState, said: RequestEvent) -> None:
        """What concerns requests that are not open is late, and dropped."""
        if isinstance(said, Opening):
            self._open(link, said)
        elif isinstance(said, RequestClosed):
            self._close(link, said.request_id)
        elif (own_id := link.requests.get(said.request_id)) is None:
            return
        elif isinstance(said, Commit):
            self._speculator.commit(replace(said, request_id=own_id))
        elif isinstance(said, Limit):
            self._speculator.limit(replace(said, request_id=own_id))
        else:
            self._speculator.context(replace(said, request_id=own_id))

    def _open(self, link: _LinkState, opening: Opening) -> None:
        own_id = self._next_id
        self._next_id += 1
        link.requests[opening.request_id] = own_id
        self._owners[own_id] = link, opening.request_id
        self._speculator.open(replace(opening, request_id=own_id, link=link.number))

    def _close(self, link: _LinkState, request_id: int) -> None:
        if (own_id := link.requests.pop(request_id, None)) is not None:
            del self._owners[own_id]
            self._speculator.close(own_id)

    def _forget(self, number: int) -> None:
        if link := self._links.pop(number, None):
            for request_id in list(link.requests):
                self._close(link, request_id)

    def _hand_out(
        self, grown: dict[int, Growth], heard: dict[int, _LinkState], timings: Timings, *, last: bool
    ) -> None:
        """Every link gets its share, when it is due or if this is the `last` round for now; those that said something
        learn at once that it was applied."""
        for own_id, growth in grown.items():
            link, request_id = self._owners[own_id]
            link.growths.append((request_id, growth.check()))
        for link in heard.values():
            link.rounds, link.report_after_rounds, link.update.timings = 0, 1, timings
        news = []
        for link in self._links.values():
            due = link.report_due() or last
            if link.number in heard or (due and link.growths):
                link.update.growths = GrowthBatch.of(link.growths)
                news.append((link.number, link.update))
                link.update, link.growths = DraftUpdate(applied=link.update.applied), []
        nodes = sum(map(len, grown.values()))
        began, self._began = self._began, self._clock()
        self._stats.append(RoundStats(self._began - began, nodes, self._dropped))
        self._dropped = 0
        if news or last:
            self._pipe.send(DraftRounds(self._stats, news))
            self._stats = []
