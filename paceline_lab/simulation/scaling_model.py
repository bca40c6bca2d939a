"""The number of processes for a load, computed from measured costs.

A target's compute process runs the pass and the engine's own work one after the other; its service process handles the
tokens meanwhile, on another core; gateways share all tokens. A process is full when it is busy for `FULL` of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_lab.fake_models.timed_config import TimedModelConfig

FULL = 0.7
"""Share of a core beyond which queues grow faster than load."""


@dataclass(frozen=True, slots=True)
class CpuPerToken:
    """CPU seconds of a process for each token that it handles, and for each request."""

    token_s: float
    request_s: float

    def busy(self, tokens_per_s: float, answer_tokens: int) -> float:
        """Share of a core in use, with answers of `answer_tokens` tokens."""
        return tokens_per_s * (self.token_s + self.request_s / answer_tokens)


@dataclass(frozen=True, slots=True)
class Costs:
    """`engine`: requests at once, rising, and CPU seconds of a step beside the pass."""

    engine: Sequence[tuple[int, float]]
    service: CpuPerToken
    gateway: CpuPerToken

    def engine_s(self, requests: int) -> float:
        """CPU seconds of a step: interpolated between measurements, proportional beyond them."""
        counts = [count for count, _ in self.engine]
        i = bisect_left(counts, requests)
        if i == len(counts):
            return self.engine[-1][1] * requests / counts[-1]
        if i == 0:
            return self.engine[0][1]
        (low, low_s), (high, high_s) = self.engine[i - 1], self.engine[i]
        return low_s + (high_s - low_s) * (requests - low) / (high - low)


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """For `requests` at once. `engine`: its share of a target's step; `service`, `gateway`: shares of a core."""

    requests: int
    targets: int
    gateways: int
    token_ms: float
    tokens_per_s: float
    engine: float
    service: float
    gateway: float


class OutOfReachError(Exception):
    """No number of targets meets the time per token."""


def process_counts(
    requests: int, costs: Costs, target: TimedModelConfig, token_ms: float, answer_tokens: int
) -> ProcessCounts:
    """The fewest processes that give each of `requests` requests a token every `token_ms`, decoded plainly.

    Raises `OutOfReachError`.
    """
    targets = _fewest(requests, costs, target, token_ms, answer_tokens)
    each = math.ceil(requests / targets)
    engine_s = costs.engine_s(each)
    step_s = target.seconds(each) + engine_s
    tokens_per_s = requests / step_s
    gateway = costs.gateway.busy(tokens_per_s, answer_tokens)
    gateways = math.ceil(gateway / FULL)
    return ProcessCounts(
        requests,
        targets,
        gateways,
        token_ms=round(1e3 * step_s, 1),
        tokens_per_s=round(tokens_per_s),
        engine=round(engine_s / step_s, 3),
        service=round(costs.service.busy(tokens_per_s / targets, answer_tokens), 3),
        gateway=round(gateway / gateways, 3),
    )


def _fewest(requests: int, costs: Costs, target: TimedModelConfig, token_ms: float, answer_tokens: int) -> int:
    def suffices(targets: int) -> bool:
        each = math.ceil(requests / targets)
        step_s = target.seconds(each) + costs.engine_s(each)
        return step_s <= token_ms / 1e3 and costs.service.busy(each / step_s, answer_tokens) <= FULL

    enough = next((count for count in range(1, requests + 1) if suffices(count)), None)
    if enough is None:
        alone_ms = 1e3 * (target.seconds(1) + costs.engine_s(1))
        raise OutOfReachError(f"one request alone gets a token every {alone_ms:.1f} ms: ask for more than that")
    return enough
