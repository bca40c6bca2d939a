"""The draft worker's loop: owns a speculator and grows trees for many links.

    take in what the links said → grow, one round → hand out the new nodes

A link is one target. What it says comes through the pipe at any time, and waits for nothing. When no open request is
worth another guess, the loop sleeps until somebody says something.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.messages import Timings
from paceline.speculators.base import Commit, Context, DraftError, Opening, Speculator
from paceline.telemetry.round import RoundStats
from paceline.tree import Growth


@dataclass(frozen=True, slots=True)
class Close:
    """The target needs no more guesses for this request."""

    request_id: int


Said = Opening | Context | Commit | Close


@dataclass(slots=True)
class Grown:
    """What rounds of the loop have for one link: nodes by request, requests that cannot be drafted and why.

    `applied` counts how often the link said something (`Told`) that the speculator has heard.
    """

    growths: list[tuple[int, Growth]] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    applied: int = 0
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Told:
    """To the loop: a link says this, to be applied in this order before anything grows."""

    link: int
    said: Sequence[Said]
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Left:
    """To the loop: a link has ended, and with it all its requests. A delivery that is under way may still come."""

    link: int


@dataclass(frozen=True, slots=True)
class Round:
    """From the loop: one round was made. `grown` has something for each link that it concerns."""

    stats: RoundStats
    grown: Sequence[tuple[int, Grown]]


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
class _Link:
    """One target's requests."""

    number: int
    requests: dict[int, int] = field(default_factory=dict)
    """The speculator's ids by the link's."""
    news: Grown = field(default_factory=Grown)


class GrowingLoop:
    """Grows until the pipe closes; every round is told as `Round`."""

    def __init__(self, speculator: Speculator, pipe: Pipe) -> None:
        self._speculator = speculator
        self._pipe = pipe
        self._mail: deque[Told | Left] = deque()
        pipe.deliver(Told, self._mail.append)
        pipe.deliver(Left, self._mail.append)
        self._links: dict[int, _Link] = {}
        self._owners: dict[int, tuple[_Link, int]] = {}  # by the speculator's id: the link, and its id there
        self._next_id = 1
        self._dropped = 0

    def run(self) -> None:
        """Return when the pipe is closed. Errors of the speculator other than `DraftError` end the loop."""
        idle = True
        with suppress(PipeClosedError):
            while True:
                self._pipe.receive(None if idle else 0.0)
                heard, queue_s = self._take_in()
                began = time.perf_counter()
                grown = self._speculator.grow()
                compute_s = time.perf_counter() - began
                idle = not grown and not self._speculator.behind
                self._hand_out(grown, heard, Timings(queue_s, compute_s, queue_s + compute_s))

    def _take_in(self) -> tuple[dict[int, _Link], float]:
        """Apply what has been said; return who said it, and how long the oldest of it waited, in seconds."""
        heard: dict[int, _Link] = {}
        queue_s = 0.0
        while self._mail:
            mail = self._mail.popleft()
            if isinstance(mail, Left):
                self._forget(mail.link)
                heard.pop(mail.link, None)
            else:
                queue_s = max(queue_s, time.perf_counter() - mail.at)
                link = heard[mail.link] = self._links.setdefault(mail.link, _Link(mail.link))
                self._apply(link, mail.said)
        return heard, queue_s

    def _apply(self, link: _Link, said: Sequence[Said]) -> None:
        link.news.applied += 1
        for each in said:
            try:
                self._tell(link, each)
            except DraftError as error:
                self._close(link, each.request_id)
                link.news.dropped[each.request_id] = str(error)
                self._dropped += 1

    def _tell(self, link: _Link, said: Said) -> None:
        """What concerns requests that are not open is late, and dropped."""
        if isinstance(said, Opening):
            self._open(link, said)
        elif isinstance(said, Close):
            self._close(link, said.request_id)
        elif (own_id := link.requests.get(said.request_id)) is None:
            return
        elif isinstance(said, Commit):
            self._speculator.commit(replace(said, request_id=own_id))
        else:
            self._speculator.context(replace(said, request_id=own_id))

    def _open(self, link: _Link, opening: Opening) -> None:
        own_id = self._next_id
        self._next_id += 1
        link.requests[opening.request_id] = own_id
        self._owners[own_id] = link, opening.request_id
        self._speculator.open(replace(opening, request_id=own_id))

    def _close(self, link: _Link, request_id: int) -> None:
        if (own_id := link.requests.pop(request_id, None)) is not None:
            del self._owners[own_id]
            self._speculator.close(own_id)

    def _forget(self, number: int) -> None:
        if link := self._links.pop(number, None):
            for request_id in list(link.requests):
                self._close(link, request_id)

    def _hand_out(self, grown: dict[int, Growth], heard: dict[int, _Link], timings: Timings) -> None:
        """Every link gets its share, and those that said something learn that it was applied."""
        for own_id, growth in grown.items():
            link, request_id = self._owners[own_id]
            link.news.growths.append((request_id, growth))
            heard[link.number] = link
        news = []
        for link in heard.values():
            link.news.timings = timings
            news.append((link.number, link.news))
            link.news = Grown(applied=link.news.applied)
        nodes = sum(len(growth.node_ids) for growth in grown.values())
        self._pipe.send(Round(RoundStats(timings.compute_s, nodes, self._dropped), news))
        self._dropped = 0
