"""Wait policies and schedules wait where waiting pays, and retry after refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from paceline.core.growth import Growth
from paceline.core.policy.inline_round_policy import InlineRoundPolicy
from paceline.core.policy.step_cost import RowCost, StepCost
from paceline.core.policy.wait_policy import WaitPolicy
from paceline.core.tree import TokenTree
from paceline.engine.draft_schedule import LockstepSchedule, make_draft_schedule
from paceline.engine.request import OWN_DRAFT_SOURCE, Request
from tests.helpers.bare_request import bare_request

DELAY_S = 1e-3
STEP_S = 10e-3
PASSES = RowCost([1, 100], [STEP_S, STEP_S])
MAX_NODES = 100


def pays(policy: WaitPolicy, height: int = 0) -> bool:
    """Whether it waits before a step of one token."""
    return policy.wait_s(height, 1.0, STEP_S) > 0


def disappoint(policy: WaitPolicy, height: int = 0, times: int = 50) -> None:
    for _ in range(times):
        policy.observe(height, 0.0, DELAY_S)


def test_the_prior_waits_less_with_height() -> None:
    policy = WaitPolicy(DELAY_S)
    assert pays(policy)
    waits = [policy.wait_s(h, 2.0, STEP_S) > 0 for h in range(WaitPolicy.MAX_HEIGHT + 5)]
    assert waits == sorted(waits, reverse=True)
    assert not waits[WaitPolicy.MAX_HEIGHT]


def test_the_timeout_follows_the_usual_delay() -> None:
    policy = WaitPolicy(DELAY_S)
    assert policy.wait_s(0, 1.0, STEP_S) == pytest.approx(WaitPolicy.TIMEOUT_FACTOR * DELAY_S)
    for _ in range(100):
        policy.observe(0, 0.9, 3 * DELAY_S)
    assert policy.wait_s(0, 1.0, STEP_S) == pytest.approx(WaitPolicy.TIMEOUT_FACTOR * 3 * DELAY_S, rel=1e-3)


def test_it_waits_while_the_loss_exceeds_the_steps_rate() -> None:
    policy = WaitPolicy(DELAY_S)
    for _ in range(200):
        policy.observe(2, 0.5, DELAY_S)  # 500 tokens per second, of which half are lost by going ahead
    assert policy.wait_s(2, expected=2.4, step_s=STEP_S) > 0  # 240 per second without waiting
    assert policy.wait_s(2, expected=2.6, step_s=STEP_S) == 0


def test_fruitless_waits_end() -> None:
    policy = WaitPolicy(DELAY_S)
    disappoint(policy)
    assert not pays(policy)
    assert pays(policy, height=1), "heights are independent"


def test_a_refused_height_is_tried_again() -> None:
    """A height that is never waited for could not be learned."""
    policy = WaitPolicy(DELAY_S)
    disappoint(policy)
    assert any(pays(policy) for _ in range(20_000))


def test_retries_are_rare_while_fruitless() -> None:
    policy = WaitPolicy(DELAY_S)
    tries = 0
    for _ in range(2000):
        if pays(policy):
            tries += 1
            policy.observe(0, 0.0, WaitPolicy.TIMEOUT_FACTOR * DELAY_S)
    assert tries < 100


def test_a_draft_that_hung_is_tried_again() -> None:
    """Fruitless waits lengthen the delay, which must shrink again."""
    policy = WaitPolicy(DELAY_S)
    for _ in range(100):
        policy.observe(0, 0.0, 1.0)
    assert not pays(policy)
    assert any(pays(policy) for _ in range(20_000))


class TestInlineRoundPolicy:
    def test_it_pays_while_its_rate_exceeds_the_steps(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(300):
            rounds.observe(0.5, 0.35, DELAY_S)  # 0.7 for each token of the frontier
        assert rounds.pays(frontier=0.4, expected=2.7, step_s=STEP_S)  # 280 per second against 270
        assert not rounds.pays(frontier=0.4, expected=2.9, step_s=STEP_S)
        assert not rounds.pays(frontier=0.3, expected=2.7, step_s=STEP_S), "a less probable frontier"

    def test_rows_of_its_nodes_are_part_of_its_cost(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(300):
            rounds.observe(0.5, 0.35, DELAY_S)
        assert rounds.pays(1.0, 1.0, STEP_S, rows_s=0.99 * (0.7 * STEP_S - DELAY_S))
        assert not rounds.pays(1.0, 1.0, STEP_S, rows_s=1.01 * (0.7 * STEP_S - DELAY_S))

    def test_slow_rounds_pay_less(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        assert rounds.pays(0.5, 2.0, STEP_S)
        for _ in range(100):
            rounds.observe(0.5, 0.4, 3 * DELAY_S)
        assert not rounds.pays(0.5, 2.0, STEP_S)

    def test_rounds_below_improbable_nodes_have_little_weight(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(20):
            rounds.observe(0.001, 0.0, DELAY_S)
        assert rounds.pays(0.5, 2.0, STEP_S)
        for _ in range(20):
            rounds.observe(0.9, 0.0, DELAY_S)
        assert not rounds.pays(0.5, 2.0, STEP_S)

    def test_without_a_frontier_it_does_not_pay(self) -> None:
        assert not InlineRoundPolicy(DELAY_S).pays(0.0, 1.0, STEP_S)

    @pytest.mark.parametrize(("beyond", "waits"), [(0.0, 0.7), (0.5, 0.2), (0.7, 0.0), (0.9, 0.0)])
    def test_lookup_nodes_are_subtracted(self, beyond: float, waits: float) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(300):
            rounds.observe(0.5, 0.35, DELAY_S)
        assert not rounds.pays(1.0, 2.0, 2.0 * DELAY_S / (1.01 * waits + 1e-6), beyond)
        if waits:
            assert rounds.pays(1.0, 2.0, 2.0 * DELAY_S / (0.99 * waits), beyond)

    def test_a_useless_draft_is_tried_again(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(100):
            rounds.observe(1.0, 0.0, 50 * DELAY_S)
        assert not rounds.pays(1.0, 1.0, STEP_S)
        assert any(rounds.pays(1.0, 1.0, STEP_S) for _ in range(20_000))


@dataclass
class Turns:
    """One request after the other, each for one step with a pass of 10 ms. A round adds a node to a chain of at
    most four."""

    concurrent: bool = False
    round_s: float = 4e-3
    step_s: float = STEP_S
    first_s: float | None = None
    """Duration of first rounds, except for the last request, whose draft has started before; None: `round_s`."""
    lookup_growth: Growth | None = None
    """Nodes from a lookup before the first round."""

    def rounds(self) -> int:
        """Drafting rounds of the last request."""
        now = [0.0]
        cost = StepCost(PASSES)
        waiting = make_draft_schedule(self.concurrent, False, cost, lambda: now[0])
        for turn in range(60):
            request = bare_request([1, 2, 3], draft="somebody")
            request.draft_started, tree = turn == 59, request.tree
            made: list[int] = []
            if self.lookup_growth:
                tree.graft(self.lookup_growth, MAX_NODES, OWN_DRAFT_SOURCE + 1)

            def receive(_: float, request: Request = request, tree: TokenTree = tree, made: list[int] = made) -> bool:
                now[0] += self.round_s if request.draft_started or self.first_s is None else self.first_s
                made.append(len(made) + 1)
                request.draft_started = True
                tree.graft(Growth(2, made[-1], [made[-1] - 1], [5], [-0.01]), MAX_NODES)
                return True

            waiting.wait([request], receive)
            cost.observe(1 + tree.size, self.step_s)
        return len(made)


@pytest.mark.parametrize(("concurrent", "round_s", "rounds"), [(False, 4e-3, 4), (False, 1.0, 0), (True, 4e-3, 1)])
def test_a_local_draft_continues_while_it_pays(concurrent: bool, round_s: float, rounds: int) -> None:
    """A concurrent draft is waited for less."""
    assert Turns(concurrent, round_s).rounds() == rounds


def test_first_rounds_do_not_count_as_delay() -> None:
    assert Turns(first_s=1.0).rounds() == 4


@pytest.mark.parametrize(
    ("chance", "depth", "rounds"),
    [(0.3, 4, 4), (0.99, 4, 0)],
    ids=["unlikely", "sure"],
)
def test_lookup_nodes_replace_a_round_only_if_probable(chance: float, depth: int, rounds: int) -> None:
    """A lookup has a chain of `depth`. Rounds that repeat it bring nothing, but later rounds may."""
    lookup = Growth(2, 1, range(depth), [5] * depth, [math.log(chance)] * depth)
    assert Turns(round_s=1e-3, lookup_growth=lookup).rounds() == rounds


def test_lockstep_has_a_timeout_over_all_rounds() -> None:
    """Useless growth used to hold the engine forever."""
    now, policy = [0.0], list[float]()
    waiting = make_draft_schedule(True, True, StepCost(PASSES), lambda: now[0])
    request = bare_request([1, 2, 3], draft="somebody")

    def receive(timeout_s: float) -> bool:
        assert now[0] < LockstepSchedule.TIMEOUT_S
        policy.append(timeout_s)
        now[0] += 0.3
        return True

    waiting.wait([request], receive)
    assert policy == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_a_very_long_round_counts_only_in_part() -> None:
    rounds = InlineRoundPolicy(DELAY_S)
    for _ in range(100):
        rounds.observe(1.0, 0.8, DELAY_S)
    rounds.observe(1.0, 0.8, 1.0)
    assert rounds.pays(0.5, 2.0, STEP_S)


@pytest.mark.parametrize(("step_s", "rounds"), [(STEP_S, 0), (4 * STEP_S, 4)])
def test_overhead_of_steps_counts(step_s: float, rounds: int) -> None:
    """A round of 15 ms does not pay with a step of 10 ms, but with one of 40 ms; its pass takes 10 ms in both."""
    assert Turns(round_s=15e-3, step_s=step_s).rounds() == rounds
