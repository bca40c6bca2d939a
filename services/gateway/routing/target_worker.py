"""One connected target, as this gateway sees it: what it has to do, what it holds, whether it can be trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.state.worker_registry import WorkerRecord
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.routing.circuit_breaker import Breaker
from paceline_services.gateway.routing.cost_model import FleetThroughput, RemainingCost, RequestCostModel
from paceline_services.gateway.routing.prefix_index import PrefixIndex, block_hashes
from paceline_services.gateway.routing.target_load import TargetLoad
from paceline_services.gateway.routing.worker_selection import TargetCandidate

MAX_INDEXED_TOKENS = 2**21
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
    without_first_token: int = 0
    rows: float = 0.0
    rows_before_first_token: float = 0.0
    heartbeat: Mapping[str, float] = field(default_factory=dict)
    load: TargetLoad = field(default_factory=TargetLoad)
    quarantine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a request with which another target's engine has died, until it is known whether this one's dies, too."""
    prefixes: PrefixIndex = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = PrefixIndex(min(self.link.description.slots, MAX_INDEXED_TOKENS))
        self.load.update_from_heartbeat(self.heartbeat, self.in_flight)

    def update_heartbeat(self, heartbeat: Mapping[str, float]) -> None:
        """The latest one in the registry."""
        self.heartbeat = heartbeat
        self.load.update_from_heartbeat(heartbeat, self.in_flight)

    def update_from_link(self) -> None:
        """A delta has come, with news of the load now and then."""
        self.load.update_from_delta(self.link.load, self.in_flight)

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
        return max(float(self.without_first_token), self.load.waiting)

    def expected_rows(self, habits: RequestCostModel) -> float:
        """Rows that it has to compute, for everybody: those of other gateways' requests are as usual."""
        return self.rows + self.load.other_requests * habits.rows.value

    def candidate(self, blocks: Sequence[int], habits: RequestCostModel, *, session: bool) -> TargetCandidate:
        """As a request finds it whose prompt has this chain."""
        cached = self.prefixes.cached_tokens(blocks)
        return TargetCandidate(self.expected_rows(habits), cached, session, self.heartbeat.get("rows_per_s", 0.0))


@dataclass(frozen=True, slots=True)
class RoutingPrompt:
    """All that a target has to compute before a request's first token there: its prompt, and what was committed."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    """Its chain."""
    salt: str = ""
    """Only requests with the same one share what a target holds."""

    @classmethod
    def of(cls, tokens: Sequence[int], salt: str = "") -> RoutingPrompt:
        return cls(tokens, block_hashes(tokens, salt=salt), salt)


class InFlightRequest:
    """`with InFlightRequest(...) as stay`: one request on one target, for as long as it is there. Keeps that target's
    books."""

    def __init__(
        self, target: Target, text: RoutingPrompt, most_tokens: int, habits: RequestCostModel, pace: FleetThroughput
    ) -> None:
        self._target = target
        self._text = text
        self._request_cost = habits
        self._throughput = pace
        self._prompt_rows = max(1, len(text.tokens) - target.prefixes.cached_tokens(text.blocks))
        self._cost = RemainingCost(self._prompt_rows, habits.expected_output_tokens(most_tokens))
        self._output: list[int] = []
        self._started = False
        self._ended = False

    def __enter__(self) -> Self:
        target = self._target
        target.breaker.on_sent()
        target.in_flight += 1
        target.without_first_token += 1
        target.rows += self._cost.rows
        target.rows_before_first_token += self._cost.rows
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        target = self._target
        self._first_token()  # it waits no longer, whether it was served or not
        target.in_flight -= 1
        target.rows -= self._cost.rows
        if not target.in_flight:
            target.rows = target.rows_before_first_token = 0.0  # no dust of floats
        if self._output and not target.link.lost:
            target.prefixes.add(block_hashes([*self._text.tokens, *self._output], self._text.blocks, self._text.salt))
        if not self._output and not self._ended:
            target.breaker.on_abandoned()

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """These have come."""
        self._target.update_from_link()
        if not tokens:
            return
        if not self._output:
            self._target.breaker.on_first_token()
            self._first_token()
        done = self._cost.advance(len(tokens))
        self._target.rows -= done
        self._throughput.add(done)
        self._output += tokens

    def succeed(self) -> None:
        """The request has said all it had to say."""
        if not self._ended:
            self._ended = True
            self._target.breaker.on_success()
            self._request_cost.record(self._prompt_rows, len(self._output))

    def _first_token(self) -> None:
        if not self._started:
            self._started = True
            self._target.without_first_token -= 1
            self._target.rows_before_first_token -= self._cost.rows
