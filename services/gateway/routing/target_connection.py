"""One connected target as this gateway sees it: what requests cost, its load, its cached prefixes, its failures."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import TracebackType
from typing import Self

from paceline.messages import EngineLoad, GenerationRequest
from paceline.state.worker_registry import WorkerRecord
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.routing.circuit_breaker import Breaker
from paceline_services.gateway.routing.worker_selection import TargetCandidate

MAX_RETRY_AFTER_S = 60
THROUGHPUT_MEMORY_S = 5.0


@dataclass(slots=True)
class MovingAverage:
    """The average of the latest values; `value` is a guess until the first one."""

    value: float
    memory: float = 64.0
    """Values after which the weight of an old one has fallen to 1/e."""
    _count: int = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) / min(self._count, self.memory)


@dataclass(slots=True)
class RequestCostModel:
    """The requests of one model."""

    output_tokens: MovingAverage = field(default_factory=lambda: MovingAverage(128.0))
    rows: MovingAverage = field(default_factory=lambda: MovingAverage(256.0))
    """Of a whole request: its prompt without the cached part, and its output."""
    rows_per_s: float = 0.0
    """What the fleet computes for this gateway while it has requests; 0: not measured yet."""
    _rows_since: float = 0.0
    _measured_at: float | None = None

    def expected_output_tokens(self, max_tokens: int) -> float:
        """Tokens that a request with this limit is expected to generate: few requests reach their limit."""
        return max(1.0, min(float(max_tokens), self.output_tokens.value))

    def record_request(self, prompt_rows: int, output_tokens: int) -> None:
        """A request has ended."""
        self.output_tokens.add(output_tokens)
        self.rows.add(prompt_rows + output_tokens)

    def record_rows(self, rows: float) -> None:
        """A target has computed these rows."""
        self._rows_since += rows

    def measure_throughput(self, now: float, *, busy: bool) -> None:
        """To be called periodically. `busy`: requests are in flight."""
        rows, self._rows_since = self._rows_since, 0.0
        before, self._measured_at = self._measured_at, now if busy else None
        if before is None or now <= before or not (busy or rows):
            return
        seconds = now - before
        weight = 1.0 - math.exp(-seconds / THROUGHPUT_MEMORY_S) if self.rows_per_s else 1.0
        self.rows_per_s += weight * (rows / seconds - self.rows_per_s)

    def retry_after_s(self, rows_ahead: float) -> int:
        """Whole seconds, from 1 to `MAX_RETRY_AFTER_S`, until these rows are computed; 1 where that is not known."""
        if self.rows_per_s <= 0:
            return 1
        rows = max(rows_ahead, self.rows.value)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(rows / self.rows_per_s)))


DELTA_PRECEDENCE_S = 2.0
"""Heartbeats come every second; for this long after a delta, a heartbeat may be older than it."""
LOAD_TTL_S = 10.0
"""An older load is unknown: Redis or the target has failed since."""


class TargetLoad:
    """The latest load. The same heartbeat, read again, changes nothing; no two heartbeats are equal, since each carries
    its number (`WorkerRegistration`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delta: EngineLoad | None = None
        self._delta_at = self._at = -math.inf
        self._registered_load: Mapping[str, float] = {}
        self._other_requests = self._waiting = 0.0

    def update_from_delta(self, load: EngineLoad | None, own: int) -> None:
        """`load`: the link's latest one. `own`: this gateway's requests at the target."""
        if load is not None and load is not self._delta:
            self._delta, self._delta_at = load, self._clock()
            self._update(load.running, load.waiting, own)

    def update_from_registry(self, registered_load: Mapping[str, float], own: int) -> None:
        if registered_load != self._registered_load:
            self._registered_load = registered_load
            if self._clock() >= self._delta_at + DELTA_PRECEDENCE_S:
                self._update(registered_load.get("running", 0.0), registered_load.get("waiting", 0.0), own)

    @property
    def other_requests(self) -> float:
        """Requests of other gateways at the time of the load. Not refreshed when our own requests end."""
        return self._other_requests if self._recent else 0.0

    @property
    def waiting(self) -> float:
        """Requests of all gateways without a first token."""
        return self._waiting if self._recent else 0.0

    @property
    def _recent(self) -> bool:
        return self._clock() < self._at + LOAD_TTL_S

    def _update(self, running: float, waiting: float, own: int) -> None:
        self._at = self._clock()
        self._other_requests, self._waiting = max(0.0, running + waiting - own), waiting


BLOCK = 32
"""Tokens per block: prefixes are known in whole blocks."""


def block_hashes(tokens: Sequence[int], known: Sequence[int] = (), salt: str = "") -> list[int]:
    """A hash per full block, of all tokens up to the block's end: equal hashes stand for equal prefixes.

    `known`: the hashes of the first blocks. `salt`: texts with different salts share no block, as at the target.
    Python's own hash is fast and enough: the hashes stay in this process, and a collision only costs time.
    """
    hashes = list(known)
    for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1] if hashes else salt, *tokens[start : start + BLOCK])))
    return hashes


class PrefixIndex:
    """Holds `max_tokens` at most: drops the blocks that were not used for longest, and the end of a text first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """The target has computed a text with these block hashes."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest known prefix of a text with these block hashes."""
        return BLOCK * sum(1 for _ in takewhile(self._blocks.__contains__, blocks))


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
