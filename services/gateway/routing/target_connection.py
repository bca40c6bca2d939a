"""One connected target as this gateway sees it: its load, its cached prefixes, its failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.messages import GenerationRequest
from paceline.state.worker_registry import WorkerRecord
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.routing.circuit_breaker import Breaker
from paceline_services.gateway.routing.cost_model import RequestCostModel
from paceline_services.gateway.routing.prefix_index import PrefixIndex, block_hashes
from paceline_services.gateway.routing.target_load import TargetLoad
from paceline_services.gateway.routing.worker_selection import TargetCandidate

MAX_INDEXED_TOKENS = 2**21
"""Tokens of one target's prefix index: about ten megabytes in this process."""


@dataclass(slots=True, eq=False)
class TargetConnection:
    record: WorkerRecord
    link: TargetLink
    breaker: Breaker = field(default_factory=Breaker)
    registered_load: Mapping[str, float] = field(default_factory=dict)
    load: TargetLoad = field(default_factory=TargetLoad)
    requests: set[InFlightRequest] = field(default_factory=set)
    """This gateway's."""
    without_first_token: set[InFlightRequest] = field(default_factory=set)
    """Those of `requests`."""
    quarantine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a request that was at another target when its engine died, until its first token here."""
    prefixes: PrefixIndex = field(init=False)
    capabilities: frozenset[str] = field(init=False)
    """Its labels and features."""

    def __post_init__(self) -> None:
        description = self.link.description
        self.capabilities = frozenset((*description.labels, *description.features))
        self.prefixes = PrefixIndex(min(description.slots, MAX_INDEXED_TOKENS))
        self.load.update_from_registry(self.registered_load, len(self.requests))

    def update_registered_load(self, registered_load: Mapping[str, float]) -> None:
        """Take the load of the latest heartbeat, from the registry."""
        self.registered_load = registered_load
        self.load.update_from_registry(registered_load, len(self.requests))

    def update_from_link(self) -> None:
        """Take the load that may have come with a delta."""
        self.load.update_from_delta(self.link.load, len(self.requests))

    @property
    def numerics(self) -> str:
        """From the link: the record in the registry may be the predecessor's."""
        return self.link.description.numerics

    @property
    def up(self) -> bool:
        """Whether the target accepts requests, by its own account."""
        return not (self.link.lost or self.link.draining or self.registered_load.get("draining"))

    @property
    def usable(self) -> bool:
        return self.up and self.breaker.allows

    @property
    def waiting(self) -> float:
        """Requests of all gateways without a first token, as far as known here."""
        return max(float(len(self.without_first_token)), self.load.waiting)

    @property
    def rows_before_first_token(self) -> float:
        """Rows of this gateway's requests without a first token."""
        return sum(request.rows_left for request in self.without_first_token)

    def expected_rows(self, costs: RequestCostModel) -> float:
        """Rows left to compute for all gateways; other gateways' requests count as average ones."""
        own = sum(request.rows_left for request in self.requests)
        return own + self.load.other_requests * costs.rows.value

    def candidate(self, blocks: Sequence[int], costs: RequestCostModel, *, session: bool) -> TargetCandidate:
        """The target as the selection sees it, for a prompt with these block hashes."""
        cached = self.prefixes.cached_tokens(blocks)
        return TargetCandidate(self.expected_rows(costs), cached, session, self.registered_load.get("rows_per_s", 0.0))


class InFlightRequest:
    """`with InFlightRequest(...) as in_flight`: counts one request at its target for as long as it is there."""

    def __init__(
        self, target: TargetConnection, request: GenerationRequest, blocks: Sequence[int], costs: RequestCostModel
    ) -> None:
        """`blocks`: the block hashes of the request's tokens."""
        self._target = target
        self._request = request
        self._blocks = blocks
        self._costs = costs
        tokens = len(request.prompt) + len(request.committed)
        max_tokens = request.sampling.max_tokens - len(request.committed)
        self._prompt_rows = max(1, tokens - target.prefixes.cached_tokens(blocks))
        self._output_rows_left = costs.expected_output_tokens(max_tokens)
        self.rows_left = self._prompt_rows + self._output_rows_left
        """Rows that the target is expected to compute for the request from now on: at least one."""
        self.output: list[int] = []
        """The tokens that have arrived."""
        self._succeeded = False

    def __enter__(self) -> Self:
        self._target.breaker.on_sent(self)
        self._target.requests.add(self)
        self._target.without_first_token.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        target = self._target
        target.requests.discard(self)
        target.without_first_token.discard(self)
        if (self.output or self._succeeded) and not target.link.lost:
            tokens = [*self._request.tokens, *self.output]
            target.prefixes.add(block_hashes(tokens, self._blocks, self._request.cache_salt))
        if not self.output and not self._succeeded:
            target.breaker.on_abandoned(self)

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """A delta with these tokens has arrived."""
        self._target.update_from_link()
        if not tokens:
            return
        if not self.output:
            self._target.breaker.on_first_token()
            self._target.prefixes.add(self._blocks)
            self._target.without_first_token.discard(self)
        before = self.rows_left
        self._output_rows_left = max(1.0, self._output_rows_left - len(tokens))
        self.rows_left = self._output_rows_left
        self._costs.record_rows(before - self.rows_left)
        self.output += tokens

    def succeed(self) -> None:
        """The request has ended well, at its target or by a stop string."""
        if not self._succeeded:
            self._succeeded = True
            self._target.breaker.on_success()
            self._costs.record_request(self._prompt_rows, len(self.output))
