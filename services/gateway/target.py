"""One connected target, as this gateway sees it: what it has to do, what it holds, whether it can be trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.state.registry import WorkerRecord
from paceline.wire.target_link import TargetLink
from services.gateway.breaker import Breaker
from services.gateway.prefixes import Prefixes, chain
from services.gateway.routing import Candidate
from services.gateway.told import Told
from services.gateway.work import Cost, Habits, Pace

MOST_KNOWN_TOKENS = 2**21
"""Of what one target holds; about ten megabytes here."""


@dataclass(slots=True, eq=False)
class Target:
    """`in_flight` counts this gateway's requests on it, `unstarted` those without a first token: always exact.

    `rows`: what they are expected to cost from now on, and `unstarted_rows` those that have not started.
    """

    record: WorkerRecord
    link: TargetLink
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    unstarted: int = 0
    rows: float = 0.0
    unstarted_rows: float = 0.0
    heartbeat: Mapping[str, float] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    quarantine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a request with which another target's engine has died, until it is known whether this one's dies, too."""
    prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(min(self.link.description.slots, MOST_KNOWN_TOKENS))
        self.told.by_heartbeat(self.heartbeat, self.in_flight)

    def tell(self, heartbeat: Mapping[str, float]) -> None:
        """The latest one in the registry."""
        self.heartbeat = heartbeat
        self.told.by_heartbeat(heartbeat, self.in_flight)

    def hear(self) -> None:
        """A delta has come, with news of the load now and then."""
        self.told.by_delta(self.link.load, self.in_flight)

    @property
    def numerics(self) -> str:
        """As the worker at the other end of the link says: a record in the registry may be that of its predecessor."""
        return self.link.description.numerics

    @property
    def up(self) -> bool:
        """It takes requests, by its own account."""
        return not (self.link.lost or self.link.draining or self.heartbeat.get("draining"))

    @property
    def usable(self) -> bool:
        return self.up and self.breaker.allows

    @property
    def waiting(self) -> float:
        """Requests, from everybody, that wait for their first token, as far as known here."""
        return max(float(self.unstarted), self.told.waiting)

    def work(self, habits: Habits) -> float:
        """Rows that it has to compute, for everybody: those of other gateways' requests are as usual."""
        return self.rows + self.told.others * habits.rows.value

    def candidate(self, blocks: Sequence[int], habits: Habits, *, session: bool) -> Candidate:
        """As a request finds it whose prompt has this chain."""
        cached = self.prefixes.tokens_known(blocks)
        return Candidate(self.work(habits), cached, session, self.heartbeat.get("rows_per_s", 0.0))


@dataclass(frozen=True, slots=True)
class Text:
    """All that a target has to compute before a request's first token there: its prompt, and what was committed."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    """Its chain."""
    salt: str = ""
    """Only requests with the same one share what a target holds."""

    @classmethod
    def of(cls, tokens: Sequence[int], salt: str = "") -> Text:
        return cls(tokens, chain(tokens, salt=salt), salt)


class Stay:
    """`with Stay(...) as stay`: one request on one target, for as long as it is there. Keeps that target's books."""

    def __init__(self, target: Target, text: Text, most_tokens: int, habits: Habits, pace: Pace) -> None:
        self._target = target
        self._text = text
        self._habits = habits
        self._pace = pace
        self._prompt_rows = max(1, len(text.tokens) - target.prefixes.tokens_known(text.blocks))
        self._cost = Cost(self._prompt_rows, habits.expected_output(most_tokens))
        self._said: list[int] = []
        self._started = False
        self._ended = False

    def __enter__(self) -> Self:
        target = self._target
        target.breaker.sent()
        target.in_flight += 1
        target.unstarted += 1
        target.rows += self._cost.rows
        target.unstarted_rows += self._cost.rows
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        target = self._target
        self._start()  # it waits no longer, whether it was served or not
        target.in_flight -= 1
        target.rows -= self._cost.rows
        if not target.in_flight:
            target.rows = target.unstarted_rows = 0.0  # no dust of floats
        if self._said and not target.link.lost:
            target.prefixes.note(chain([*self._text.tokens, *self._said], self._text.blocks, self._text.salt))
        if not self._said and not self._ended:
            target.breaker.no_verdict()

    def tokens(self, tokens: Sequence[int]) -> None:
        """These have come."""
        self._target.hear()
        if not tokens:
            return
        if not self._said:
            self._target.breaker.answered()
            self._start()
        done = self._cost.tokens(len(tokens))
        self._target.rows -= done
        self._pace.add(done)
        self._said += tokens

    def ended(self) -> None:
        """The request has said all it had to say."""
        if not self._ended:
            self._ended = True
            self._target.breaker.succeeded()
            self._habits.ended(self._prompt_rows, len(self._said))

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._target.unstarted -= 1
            self._target.unstarted_rows -= self._cost.rows
