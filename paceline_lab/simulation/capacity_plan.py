"""Number of workers, speed, and the load at which speculation stops paying, from a simulation of every load.

Nothing is fitted. The real engine, row budget and wait policy run in virtual time, over models
that take as long as the accelerators do; see `paceline_lab.simulation.pair_simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import SamplingParams
from paceline.messages import GenerationRequest
from paceline_lab.simulation.pair_simulation import SimulatedPair, SimulationResult, simulate

LOADS = (1, 2, 4, 8, 16, 32, 64)
"""Requests that one target runs at once."""
GUESSES = (1, 2, 4, 8)
"""Draft tokens of a chain, for the formula."""
TOKENS = 96
"""Most output tokens of a simulated request; its prompt is as much shorter as its output."""
PROMPT_TOKENS = 4000
"""Its longest prompt. A longer one makes the simulated output shorter still."""
LEAST_GAIN = 1.02
"""Smallest speed-up over plain decoding that justifies a draft worker."""
ENOUGH = 0.95
"""Enough drafts reach this share of the speed with twice as many."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One target with `requests` requests at once. Tokens per second are those of all of them together.

    `link_mbit_s`: between the target and its draft worker, both ways, while it streams.
    """

    requests: int
    plain: float
    streamed: float
    link_mbit_s: float = 0.0

    @property
    def best(self) -> float:
        return max(self.plain, self.streamed)

    @property
    def token_ms(self) -> float:
        """Between two tokens of a request, on average."""
        return 1e3 * self.requests / self.best


@dataclass(frozen=True, slots=True)
class PlannedDemand:
    """The load of the pool, and its goal."""

    requests_per_s: float
    output_tokens: int
    token_ms: float
    """Goal: mean time between a request's tokens."""
    prompt_tokens: int = 3


@dataclass(frozen=True, slots=True)
class ClosedFormSpeedup:
    """Speed-up of one request with a chain of `guesses` draft tokens, by the formula of Leviathan et al. 2023
    with one acceptance rate for all draft tokens."""

    guesses: int
    accepted: float
    """Expected per verification: the sum over depths of the product of the rates down to each."""
    lockstep: float
    """Over plain decoding, if draft and verification wait for each other."""
    hidden: float
    """Over plain decoding, if drafting and network hide behind the verification completely."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The pool for a demand. `at_once`: requests on each target."""

    formulas: Sequence[ClosedFormSpeedup]
    loads: Sequence[LoadPoint]
    pays_up_to: int
    """Most requests per target with a gain from speculation; 0: never."""
    target_workers: int
    draft_workers: int
    at_once: float
    token_ms: float


class CannotPlanError(Exception):
    """No number of workers meets the demand."""


def plan_capacity(pair: SimulatedPair, demand: PlannedDemand) -> CapacityPlan:
    """Size the pool. Raises `CannotPlanError`."""
    loads = [load(pair, requests, demand) for requests in LOADS]
    within = [each for each in loads if each.token_ms <= demand.token_ms]
    if not within:
        raise CannotPlanError(
            f"one request alone gets a token every {loads[0].token_ms:.1f} ms: {demand.token_ms:g} ms needs a faster "
            "target, a better draft, or a shorter round trip"
        )
    demanded = demand.requests_per_s * demand.output_tokens
    targets = max(1, math.ceil(demanded / max(each.best for each in within)))
    at_once = requests_at(loads, demanded / targets)
    near = next((each for each in loads if each.requests >= at_once), loads[-1])
    pays = near.streamed >= LEAST_GAIN * near.plain
    return CapacityPlan(
        formulas=[formula(pair, guesses) for guesses in GUESSES],
        loads=loads,
        pays_up_to=max((each.requests for each in loads if each.streamed >= LEAST_GAIN * each.plain), default=0),
        target_workers=targets,
        draft_workers=targets * drafts_for(pair, near.requests, demand) if pays else 0,
        at_once=at_once,
        token_ms=1e3 * at_once * targets / demanded,
    )


def formula(pair: SimulatedPair, guesses: int) -> ClosedFormSpeedup:
    """The closed form for a pair with a draft and one request."""
    assert pair.draft is not None
    accepted = sum(pair.draft.agreement**depth for depth in range(1, guesses + 1))
    plain, verified = pair.target.seconds(1), pair.target.seconds(1 + guesses)
    drafted = guesses * pair.draft.seconds(1) + pair.rtt_s
    tokens = 1 + accepted
    return ClosedFormSpeedup(guesses, accepted, tokens * plain / (verified + drafted), tokens * plain / verified)


def load(pair: SimulatedPair, requests: int, demand: PlannedDemand) -> LoadPoint:
    """Simulate `requests` requests at once, plainly and streamed."""
    streamed = serve(pair, requests, demand)
    return LoadPoint(
        requests,
        serve(replace(pair, draft=None), requests, demand).tokens_per_s,
        streamed.tokens_per_s,
        8e-6 * streamed.wire_bytes / streamed.seconds,
    )


def serve(pair: SimulatedPair, requests: int, demand: PlannedDemand) -> SimulationResult:
    """One target for `requests` requests together, with slots for all of them."""
    fitting = demand.output_tokens * PROMPT_TOKENS // demand.prompt_tokens
    tokens = max(1, min(TOKENS, demand.output_tokens, fitting))
    prompt_tokens = min(PROMPT_TOKENS, math.ceil(demand.prompt_tokens * tokens / demand.output_tokens))
    slots = requests * (prompt_tokens + tokens + 1 + pair.speculation.max_tree_nodes)
    pair = replace(pair, engine=pair.engine.model_copy(update={"slots": slots}))
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    prompts = ([number + 1, *[2] * (prompt_tokens - 1)] for number in range(requests))
    return simulate(pair, [(0.0, GenerationRequest(f"r{prompt[0]}", prompt, sampling)) for prompt in prompts])


def requests_at(loads: Sequence[LoadPoint], tokens_per_s: float) -> float:
    """Requests at once on a target that gives `tokens_per_s`: Little's law, interpolated between the loads."""
    requests, known = 0.0, 0.0
    for each in loads:
        if each.best >= tokens_per_s:
            return requests + (each.requests - requests) * (tokens_per_s - known) / (each.best - known)
        requests, known = each.requests, each.best
    return requests


def drafts_for(pair: SimulatedPair, requests: int, demand: PlannedDemand) -> int:
    """Number of draft workers for one target with `requests` requests: twice as many would hardly add speed."""
    drafts = 1
    here = serve(pair, requests, demand).tokens_per_s
    while drafts < requests:
        more = serve(replace(pair, drafts=2 * drafts), requests, demand).tokens_per_s
        if here >= ENOUGH * more:
            break
        drafts, here = 2 * drafts, more
    return drafts
