"""Capacity planning: the arithmetic on given loads, and whole plans on small simulated ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.messages import GenerationRequest
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation import capacity_plan as planning
from paceline_lab.simulation.capacity_plan import CannotPlanError, LoadPoint, PlannedDemand, plan_capacity, requests_at
from paceline_lab.simulation.pair_simulation import SimulatedPair, SimulationResult

LOADS = [LoadPoint(1, 100.0, 300.0), LoadPoint(4, 400.0, 800.0), LoadPoint(16, 1600.0, 1200.0)]
SLOW = TimedModelConfig(step_ms=10, knee_rows=16)


def pair(agreement: float = 0.8, rtt_s: float = 0.0) -> SimulatedPair:
    return SimulatedPair(SLOW, TimedModelConfig(step_ms=1, knee_rows=128, agreement=agreement), rtt_s)


@pytest.fixture(autouse=True)
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LOADS", (1, 4, 16))
    monkeypatch.setattr(planning, "TOKENS", 64)


@pytest.mark.parametrize(
    ("tokens_per_s", "requests"), [(0, 0), (150, 0.5), (300, 1), (550, 2.5), (1200, 10), (9e9, 16)]
)
def test_requests_at_once_follow_from_the_demand(tokens_per_s: float, requests: float) -> None:
    assert requests_at(LOADS, tokens_per_s) == pytest.approx(requests)


@pytest.mark.parametrize(("requests_per_s", "workers"), [(1, 1), (15, 2), (150, 15)])
def test_targets_are_as_many_as_the_goal_needs(
    monkeypatch: pytest.MonkeyPatch, requests_per_s: float, workers: int
) -> None:
    """Within 6 ms per token a target of LOADS gives 800 tokens per second; each request takes 100 ms of that."""
    monkeypatch.setattr(planning, "load", lambda _, requests, demand: next(x for x in LOADS if x.requests == requests))
    planned = plan_capacity(pair(), PlannedDemand(requests_per_s, output_tokens=80, token_ms=6))
    assert planned.target_workers == workers
    assert planned.token_ms <= 6
    assert planned.pays_up_to == 4


def test_the_formula_is_leviathan_s() -> None:
    """With c the draft's step over the target's, and E[accepted] + 1 = (1 - a ** (K + 1)) / (1 - a)."""
    a, k, c = 0.8, 4, 0.1
    formula = planning.formula(pair(a), k)
    assert formula.accepted + 1 == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert formula.lockstep == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)))
    assert formula.hidden == pytest.approx(formula.accepted + 1)
    assert planning.formula(pair(a, rtt_s=0.01), k).lockstep == pytest.approx((formula.accepted + 1) / (k * c + 2))


def test_speculation_pays_less_the_fuller_a_target_is() -> None:
    planned = plan_capacity(pair(), PlannedDemand(1, 40, 100))
    rates = [load.streamed / load.plain for load in planned.loads]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2
    assert planned.draft_workers >= 1


def test_a_useless_draft_is_left_out() -> None:
    planned = plan_capacity(pair(agreement=0.0), PlannedDemand(1, 40, 100))
    assert (planned.pays_up_to, planned.draft_workers) == (0, 0)


def test_a_draft_slowed_by_many_rows_needs_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed with one draft is 0.98 of that with two, and 0.84 for the slow one."""
    monkeypatch.setattr(planning, "TOKENS", 128)
    slow = SimulatedPair(SLOW, TimedModelConfig(step_ms=1, knee_rows=1, agreement=0.8))
    demand = PlannedDemand(1, 128, 100)
    assert planning.drafts_for(pair(), 4, demand) == 1
    assert planning.drafts_for(slow, 4, demand) > 1


def test_a_simulated_request_has_the_demand_s_share_of_prompt_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[tuple[int, list[tuple[int, int]]]] = []

    def record(pair: SimulatedPair, requests: Sequence[tuple[float, GenerationRequest]]) -> SimulationResult:
        sizes = [(len(each.prompt), each.sampling.max_tokens) for _, each in requests]
        simulated.append((pair.engine.slot_count, sizes))
        return SimulationResult()

    monkeypatch.setattr(planning, "simulate", record)
    for output_tokens, expected in ((640, (1600, 64)), (80, (4000, 20)), (1, (4000, 1))):
        planning.serve(pair(), 4, PlannedDemand(1, output_tokens, 100, prompt_tokens=16_000))
        slots, sizes = simulated[-1]
        assert sizes == [expected] * 4
        assert slots >= sum(map(sum, sizes))  # none waits for another one's


def test_an_output_of_few_tokens_is_simulated_as_it_is() -> None:
    [tokens] = planning.serve(pair(), 1, PlannedDemand(1, 5, 100)).tokens.values()
    assert len(tokens) == 5


def test_an_impossible_demand_is_an_error() -> None:
    with pytest.raises(CannotPlanError, match="one request alone gets a token every"):
        plan_capacity(pair(), PlannedDemand(1, 40, token_ms=0.5))
