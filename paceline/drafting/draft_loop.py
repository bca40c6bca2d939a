"""The draft worker's loop: grows the trees of many links with one speculator.

    apply the events of all links → draft one round → send the new nodes

A link is the connection of one target. Its events arrive through the pipe at any time. The loop sleeps when no open
request gets more nodes, until the next event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.core.growth import Growth, GrowthBatch
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator
from paceline.ipc.pipe import Pipe, PipeClosedError
from paceline.messages import Timings
from paceline.telemetry.step_stats import RoundStats


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """The target needs no more draft tokens for this request."""

    request_id: int


RequestEvent = Opening | Context | Commit | Limit | RequestClosed


@dataclass(slots=True)
class LinkUpdate:
    """The results of one or more rounds for one link."""

    growths: GrowthBatch = field(default_factory=GrowthBatch)
    """New nodes by request."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Requests that cannot be drafted, and why."""
    applied: int = 0
    """How many of the link's `LinkEvents` the speculator has applied."""
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """To the loop: events of a link, in order, to apply before the next round."""

    link: int
    events: Sequence[RequestEvent]
    received_at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """To the loop: a link and all its requests have ended. An update for it may still be on its way."""

    link: int


@dataclass(frozen=True, slots=True)
class DraftRounds:
    """From the loop: the rounds since the last message, and the updates of the links that have any."""

    stats: Sequence[RoundStats]
    grown: Sequence[tuple[int, LinkUpdate]]


@dataclass(slots=True)
class _LinkState:
    """The requests of one link."""

    number: int
    requests: dict[int, int] = field(default_factory=dict)
    """The speculator's request ids, by the link's."""
    update: LinkUpdate = field(default_factory=LinkUpdate)
    growths: list[tuple[int, Growth]] = field(default_factory=list)
    """Growth that was not sent yet."""
    rounds: int = 0
    """Rounds since the link's last event."""
    report_after_rounds: int = 1

    def report_due(self) -> bool:
        """Count a round. Growth is sent after 1, 3, 5, 7, 10, 15, ... rounds: at once while the target may be waiting,
        later in larger pieces, since a busy target pays more for a frame than for its nodes."""
        self.rounds += 1
        if self.rounds < self.report_after_rounds:
            return False
        self.report_after_rounds = self.rounds + max(2, self.rounds // 2)
        return True


class DraftLoop:
    """Drafts until the pipe closes; sends `DraftRounds`."""

    def __init__(self, speculator: Speculator, pipe: Pipe, clock: Callable[[], float] = time.perf_counter) -> None:
        self._speculator = speculator
        self._clock = clock
        self._pipe = pipe
        self._inbox: deque[LinkEvents | LinkClosed] = deque()
        pipe.on(LinkEvents, self._inbox.append)
        pipe.on(LinkClosed, self._inbox.append)
        self._links: dict[int, _LinkState] = {}
        self._owners: dict[int, tuple[_LinkState, int]] = {}  # by the speculator's id: the link and the link's id
        self._next_id = 1
        self._dropped = 0
        self._stats: list[RoundStats] = []
        """Of rounds that were not reported yet."""
        self._began = 0.0
        """When this round began: at the event that woke the loop, or at the end of the round before."""

    def run(self) -> None:
        """Return when the pipe is closed. Errors of the speculator other than `DraftError` end the loop."""
        idle = True
        with suppress(PipeClosedError):
            while True:
                self._pipe.receive(None if idle else 0.0)
                if idle:
                    self._began = self._clock()
                active, queue_s = self._apply_inbox()
                began = self._clock()
                grown = self._speculator.grow()
                compute_s = self._clock() - began
                idle = not grown and not self._speculator.behind
                self._collect(grown, active, Timings(queue_s, compute_s, queue_s + compute_s))
                self._send(active, sum(map(len, grown.values())), last=idle)

    def _apply_inbox(self) -> tuple[dict[int, _LinkState], float]:
        """Apply all events; return the links that had any, and how long the oldest event waited, in seconds."""
        active: dict[int, _LinkState] = {}
        queue_s = 0.0
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, LinkClosed):
                self._close_link(message.link)
                active.pop(message.link, None)
            else:
                queue_s = max(queue_s, self._clock() - message.received_at)
                link = active[message.link] = self._links.setdefault(message.link, _LinkState(message.link))
                self._apply(link, message.events)
        return active, queue_s

    def _apply(self, link: _LinkState, events: Iterable[RequestEvent]) -> None:
        link.update.applied += 1
        for event in events:
            try:
                self._apply_event(link, event)
            except DraftError as error:
                self._close(link, event.request_id)
                link.update.dropped[event.request_id] = str(error)
                self._dropped += 1

    def _apply_event(self, link: _LinkState, event: RequestEvent) -> None:
        """Apply an event. Late events of closed requests are ignored. Raises `DraftError`."""
        if isinstance(event, Opening):
            self._open(link, event)
        elif isinstance(event, RequestClosed):
            self._close(link, event.request_id)
        elif (own_id := link.requests.get(event.request_id)) is None:
            return
        elif isinstance(event, Commit):
            self._speculator.description.check_tokens(event.tokens)
            self._speculator.commit(replace(event, request_id=own_id))
        elif isinstance(event, Limit):
            self._speculator.limit(replace(event, request_id=own_id))
        else:
            self._speculator.context(replace(event, request_id=own_id))

    def _open(self, link: _LinkState, opening: Opening) -> None:
        own_id = self._next_id
        self._next_id += 1
        link.requests[opening.request_id] = own_id
        self._owners[own_id] = link, opening.request_id
        self._speculator.description.check_tokens(opening.tokens)
        self._speculator.open(replace(opening, request_id=own_id, link=link.number))

    def _close(self, link: _LinkState, request_id: int) -> None:
        if (own_id := link.requests.pop(request_id, None)) is not None:
            del self._owners[own_id]
            self._speculator.close(own_id)

    def _close_link(self, number: int) -> None:
        if link := self._links.pop(number, None):
            for request_id in list(link.requests):
                self._close(link, request_id)

    def _collect(self, grown: dict[int, Growth], active: dict[int, _LinkState], timings: Timings) -> None:
        """Add a round's growth to the links' unsent growth."""
        for own_id, growth in grown.items():
            link, request_id = self._owners[own_id]
            link.growths.append((request_id, growth.check()))
        for link in active.values():
            link.rounds, link.report_after_rounds, link.update.timings = 0, 1, timings

    def _send(self, active: dict[int, _LinkState], nodes: int, *, last: bool) -> None:
        """Send the updates that are due. Links with events get one at once, to learn that the events are applied; after
        the `last` round before a pause, every link with growth does."""
        updates = []
        for link in self._links.values():
            due = link.report_due() or last
            if link.number in active or (due and link.growths):
                link.update.growths = GrowthBatch.of(link.growths)
                updates.append((link.number, link.update))
                link.update, link.growths = LinkUpdate(applied=link.update.applied), []
        began, self._began = self._began, self._clock()
        self._stats.append(RoundStats(self._began - began, nodes, self._dropped))
        self._dropped = 0
        if updates or last:
            self._pipe.send(DraftRounds(self._stats, updates))
            self._stats = []
