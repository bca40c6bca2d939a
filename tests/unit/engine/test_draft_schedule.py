"""Drafts are polled and waited for where that pays, and tried again after refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from paceline.config import SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowCost, StepCost
from paceline.core.policy.wait_policy import WaitPolicy
from paceline.engine.draft_client import NoDraftClient, PollResult
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import LockstepSchedule, ReceiveUpdates, make_draft_schedule
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.engine.request import Request
from tests.unit.engine.bare_request import bare_request

DELAY_S = 1e-3
STEP_S = 10e-3
PASSES = RowCost([1, 100], [STEP_S, STEP_S])
MAX_NODES = 100
UNGATED = SpeculativeConfig(row_budget=False)
LONG = 20_000
"""After so many refusals the prior counts again."""


def drafted_request() -> Request:
    return bare_request([1, 2, 3], draft="somebody")


class TestWaitPolicy:
    """Steps of one token, before their first wait."""

    def policy(
        self, times: int = 0, gain: float = 0.0, delay_s: float = DELAY_S, later_s: float | None = None
    ) -> WaitPolicy:
        """A policy that has waited so many times in first and later rounds; `gain`: for each token of the frontier."""
        policy = WaitPolicy(DELAY_S)
        for _ in range(times):
            policy.observe(0.5, gain / 2, delay_s, first=True)
            policy.observe(0.5, gain / 2, delay_s if later_s is None else later_s, first=False)
        return policy

    def waits(
        self,
        policy: WaitPolicy,
        expected: float = 1.0,
        step_s: float = STEP_S,
        *,
        frontier: float = 1.0,
        rounds: int = 1,
        first: bool = True,
        by_lookups: float = 0.0,
        rows_s: float = 0.0,
    ) -> bool:
        more = {"first": first, "by_lookups": by_lookups, "rows_s": rows_s}
        return policy.wait_s(frontier, rounds, expected, step_s, **more) > 0

    @pytest.mark.parametrize(("times", "delay_s"), [(0, DELAY_S), (100, 3 * DELAY_S)])
    def test_the_timeout_follows_the_usual_delay(self, times: int, delay_s: float) -> None:
        timeout_s = pytest.approx(WaitPolicy.TIMEOUT_FACTOR * delay_s, rel=1e-3)
        policy = self.policy(times, 0.9, delay_s, DELAY_S / 2)
        assert policy.wait_s(1.0, 1, 1.0, STEP_S, first=True) == timeout_s

    def test_later_rounds_have_a_delay_of_their_own(self) -> None:
        policy = self.policy(100, 0.9, 3 * DELAY_S, DELAY_S)
        later_s = policy.wait_s(1.0, 1, 1.0, STEP_S, first=False)
        assert later_s == pytest.approx(WaitPolicy.TIMEOUT_FACTOR * DELAY_S, rel=1e-3)

    @pytest.mark.parametrize("delay_s", [3 * DELAY_S, 7 * DELAY_S])
    def test_it_learns_delays_far_above_the_prior(self, delay_s: float) -> None:
        """Growth always comes after `delay_s`, and waiting for it pays: 0.6 tokens per step of 40 ms."""
        policy, served = self.policy(), 0
        for _ in range(200):
            wait_s = policy.wait_s(1.0, 1, 1.0, 4 * STEP_S, first=True)
            policy.observe(1.0, 0.6 if wait_s >= delay_s else 0.0, min(wait_s, delay_s), first=True)
            served += wait_s >= delay_s
        assert served > 180

    def test_it_waits_while_the_loss_exceeds_the_steps_rate(self) -> None:
        policy = self.policy(200, 0.5)  # 500 tokens per second, of which half are lost by going ahead
        assert self.waits(policy, expected=2.4)  # 240 per second without waiting
        assert not self.waits(policy, expected=2.6)

    def test_nothing_comes_below_improbable_nodes(self) -> None:
        assert self.waits(self.policy(), 2.0)
        assert not self.waits(self.policy(), 2.0, frontier=0.2)
        assert not self.waits(self.policy(), 0.0, frontier=0.0)

    def test_a_slow_first_round_pays_by_the_rounds_after_it(self) -> None:
        """The first takes 4 ms, the others 0.1 ms: 0.8, 0.64 and 0.512 tokens, of which half are lost."""
        policy = self.policy(200, 0.8, 4 * DELAY_S, DELAY_S / 10)
        assert [self.waits(policy, 2.0, rounds=rounds) for rounds in (1, 2, 3)] == [False, False, True]
        assert self.waits(policy, 2.0, first=False)

    def test_no_level_is_left(self) -> None:
        assert not self.waits(self.policy(), rounds=0)

    def test_what_lookups_have_guessed_is_not_waited_for(self) -> None:
        policy = self.policy(200, 0.5)
        assert self.waits(policy, by_lookups=0.2)
        assert not self.waits(policy, by_lookups=0.4)
        assert not self.waits(policy, by_lookups=1.0, rounds=5)

    def test_rows_of_its_nodes_are_part_of_its_cost(self) -> None:
        policy = self.policy(200, 0.5)
        assert self.waits(policy, rows_s=1.4 * DELAY_S)
        assert not self.waits(policy, rows_s=1.6 * DELAY_S)

    def test_rounds_below_improbable_nodes_have_little_weight(self) -> None:
        probable, improbable = self.policy(), self.policy()
        for _ in range(20):
            probable.observe(0.9, 0.0, DELAY_S, first=True)
            improbable.observe(0.001, 0.0, DELAY_S, first=True)
        assert not self.waits(probable)
        assert self.waits(improbable)

    def test_several_rounds_at_once_count_as_one(self) -> None:
        """A gain above 1 would promise more with every level."""
        assert not self.waits(self.policy(200, 3.0), 5.1)

    @pytest.mark.parametrize(("times", "delay_s"), [(50, DELAY_S), (100, 1.0)], ids=["fruitless", "hung"])
    def test_a_refused_draft_is_waited_for_again(self, times: int, delay_s: float) -> None:
        """A draft that is never waited for could not be learned. Fruitless waits lengthen the delays, which must
        shrink again."""
        policy = self.policy(times, 0.0, delay_s)
        assert not self.waits(policy)
        assert not self.waits(policy, first=False)
        assert any(self.waits(policy) for _ in range(LONG))
        assert self.waits(policy, first=False)

    def test_retries_are_rare_while_fruitless(self) -> None:
        policy, tries = self.policy(), 0
        for _ in range(2000):
            if wait_s := policy.wait_s(1.0, 4, 1.0, STEP_S, first=True):
                tries += 1
                policy.observe(1.0, 0.0, wait_s, first=True)
        assert tries < 100


class Rounds(WaitPolicy):
    def pays(self, frontier: float, expected: float, step_s: float, beyond: float = 0.0, rows_s: float = 0.0) -> bool:
        return self.wait_s(frontier, 1, expected, step_s, first=True, by_lookups=beyond, rows_s=rows_s) > 0


class TestInlineRounds:
    """Of a draft in this process: one round ahead, and nothing of it serves the next step."""

    def policy(self, times: int = 300, gain: float = 0.35, delay_s: float = DELAY_S, frontier: float = 0.5) -> Rounds:
        """A policy that has drafted so many rounds; by default a round brings 0.7 for each token of the frontier."""
        policy = Rounds(DELAY_S, salvaged_share=0.0)
        for _ in range(times):
            policy.observe(frontier, gain, delay_s, first=True)
        return policy

    def test_a_round_pays_while_its_rate_exceeds_the_steps(self) -> None:
        rounds = self.policy()
        assert rounds.pays(frontier=0.4, expected=2.7, step_s=STEP_S)  # 280 per second against 270
        assert not rounds.pays(frontier=0.4, expected=2.9, step_s=STEP_S)
        assert not rounds.pays(frontier=0.3, expected=2.7, step_s=STEP_S), "a less probable frontier"
        assert not rounds.pays(frontier=0.0, expected=1.0, step_s=STEP_S)

    def test_rows_of_its_nodes_are_part_of_its_cost(self) -> None:
        free_s = 0.7 * STEP_S - DELAY_S
        assert self.policy().pays(1.0, 1.0, STEP_S, rows_s=0.99 * free_s)
        assert not self.policy().pays(1.0, 1.0, STEP_S, rows_s=1.01 * free_s)

    @pytest.mark.parametrize(("beyond", "left"), [(0.0, 0.7), (0.5, 0.2), (0.7, 0.0), (0.9, 0.0)])
    def test_lookup_nodes_are_subtracted(self, beyond: float, left: float) -> None:
        assert not self.policy().pays(1.0, 2.0, 2.0 * DELAY_S / (1.01 * left + 1e-6), beyond)
        assert not left or self.policy().pays(1.0, 2.0, 2.0 * DELAY_S / (0.99 * left), beyond)

    def test_slow_rounds_pay_less_and_a_single_very_long_one_counts_only_in_part(self) -> None:
        assert not self.policy(100, 0.4, 3 * DELAY_S).pays(0.5, 2.0, STEP_S)
        rounds = self.policy(100, 0.8, frontier=1.0)
        rounds.observe(1.0, 0.8, 1.0, first=True)
        assert rounds.pays(0.5, 2.0, STEP_S)

    def test_rounds_below_improbable_nodes_have_little_weight(self) -> None:
        assert self.policy(0).pays(0.5, 2.0, STEP_S)
        assert self.policy(20, 0.0, frontier=0.001).pays(0.5, 2.0, STEP_S)
        assert not self.policy(20, 0.0, frontier=0.9).pays(0.5, 2.0, STEP_S)

    def test_a_useless_draft_is_tried_again(self) -> None:
        rounds = self.policy(100, 0.0, 50 * DELAY_S, frontier=1.0)
        assert not rounds.pays(1.0, 1.0, STEP_S)
        assert any(rounds.pays(1.0, 1.0, STEP_S) for _ in range(LONG))


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
        now = 0.0
        cost = StepCost(PASSES)
        schedule = make_draft_schedule(self.concurrent, False, cost, lambda: now)
        for turn in range(60):
            request, made = drafted_request(), 0
            request.draft_started = turn == 59
            if self.lookup_growth:
                request.tree.graft(self.lookup_growth, MAX_NODES, OWN_DRAFT_SOURCE + 1)

            def receive(_: float, request: Request = request) -> bool:
                nonlocal now, made
                now += self.round_s if request.draft_started or self.first_s is None else self.first_s
                made += 1
                request.draft_started = True
                request.tree.graft(Growth(2, made, [made - 1], [5], [-0.01]), MAX_NODES)
                return True

            schedule.wait([request], receive)
            cost.observe(1 + request.tree.size, self.step_s)
        return made


def lookup(chance: float) -> Growth:
    return Growth(2, 1, range(4), [5] * 4, [math.log(chance)] * 4)


@pytest.mark.parametrize(
    ("turns", "rounds"),
    [
        pytest.param(Turns(), 4, id="a local draft goes on while it pays"),
        pytest.param(Turns(round_s=1.0), 0, id="a slow one does not"),
        pytest.param(Turns(concurrent=True), 1, id="a concurrent draft is waited for less"),
        pytest.param(Turns(first_s=1.0), 4, id="first rounds do not count as delay"),
        # Rounds that repeat the lookup's chain bring nothing, but later rounds may.
        pytest.param(Turns(round_s=1e-3, lookup_growth=lookup(0.3)), 4, id="an unlikely lookup replaces no round"),
        pytest.param(Turns(round_s=1e-3, lookup_growth=lookup(0.99)), 0, id="a sure one replaces all"),
        # The pass takes 10 ms in both.
        pytest.param(Turns(round_s=15e-3, step_s=STEP_S), 0, id="a round longer than the step"),
        pytest.param(Turns(round_s=15e-3, step_s=4 * STEP_S), 4, id="overhead of steps counts"),
    ],
)
def test_a_draft_is_waited_for_while_it_pays(turns: Turns, rounds: int) -> None:
    assert turns.rounds() == rounds


def test_a_concurrent_draft_is_judged_by_its_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup has guessed a node that the draft may guess, too; a row takes 1 ms, a round 2 ms."""
    asked: list[dict[str, float]] = []
    observed: list[tuple[float, float, float, bool]] = []
    now = 0.0

    class Recorded(WaitPolicy):
        def wait_s(self, frontier: float, rounds: int, expected: float, step_s: float, **more: float) -> float:
            asked.append({"frontier": frontier, "rounds": rounds, "expected": expected, "step_s": step_s, **more})
            return 3e-3 if len(asked) < 3 else 0.0

        def observe(self, frontier: float, gain: float, delay_s: float, *, first: bool) -> None:
            observed.append((frontier, gain, delay_s, first))

    def receive(timeout_s: float) -> bool:
        nonlocal now
        assert timeout_s == 3e-3
        now += 2e-3
        depth = len(observed) + 1
        request.tree.graft(Growth(2, depth, [depth - 1], [7], [math.log(0.5)]), MAX_NODES)
        return True

    monkeypatch.setattr("paceline.engine.draft_schedule.WaitPolicy", Recorded)
    request = drafted_request()
    request.max_depth = 4
    request.tree.graft(Growth(2, 1, [0], [5], [math.log(0.4)]), MAX_NODES, OWN_DRAFT_SOURCE + 1)
    cost = StepCost(RowCost([1, 101], [10e-3, 110e-3]))
    make_draft_schedule(True, False, cost, lambda: now).wait([request], receive)
    assert [each["frontier"] for each in asked] == pytest.approx([1.0, 0.5, 0.25])
    assert [each["rounds"] for each in asked] == [4, 3, 2]
    assert [each["first"] for each in asked] == [True, False, False]
    assert [each["by_lookups"] for each in asked] == pytest.approx([0.4] * 3)
    assert [each["rows_s"] for each in asked] == pytest.approx([1e-3] * 3)
    assert asked[1]["step_s"] - asked[0]["step_s"] >= 2e-3 - 1e-9, "the wait counts"
    assert observed == [pytest.approx((1.0, 0.5, 2e-3, True)), pytest.approx((0.5, 0.25, 2e-3, False))]


def test_lockstep_has_a_timeout_over_all_rounds() -> None:
    """Useless growth used to hold the engine forever."""
    now, timeouts = 0.0, list[float]()
    waiting = make_draft_schedule(True, True, StepCost(PASSES), lambda: now)

    def receive(timeout_s: float) -> bool:
        nonlocal now
        assert now < LockstepSchedule.TIMEOUT_S
        timeouts.append(timeout_s)
        now += 0.3
        return True

    waiting.wait([drafted_request()], receive)
    assert timeouts == pytest.approx([1.0, 0.7, 0.4, 0.1])


class Polled(NoDraftClient):
    """Sends one node per poll."""

    def __init__(self, *, concurrent: bool, more: bool = True) -> None:
        self.concurrent, self.more, self.polls = concurrent, more, 0

    def poll(self, timeout_s: float) -> PollResult:
        self.polls += 1
        return PollResult([(1, Growth(2, self.polls, [self.polls - 1], [5], [-0.1]))], may_continue=self.more)


class FixedRounds:
    """Waits for a fixed number of rounds."""

    depth_factor = 1

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.waits: list[Sequence[Request]] = []

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        self.waits.append(drawing)
        for _ in range(self._rounds):
            if not receive(1.0):
                return


class TestManager:
    def manager(self, drafting: Polled, schedule: FixedRounds) -> DraftManager:
        return DraftManager(drafting, (), UNGATED, schedule, 10, lambda: 0.0)

    @pytest.mark.parametrize(
        ("concurrent", "draws", "polls"), [(False, True, 0), (False, False, 1), (True, True, 1), (True, False, 1)]
    )
    @pytest.mark.parametrize("rounds", [0, 2])
    def test_a_local_draft_runs_one_round_with_prompts_and_else_by_schedule(
        self, concurrent: bool, draws: bool, polls: int, rounds: int
    ) -> None:
        """A concurrent draft is polled once before the schedule may wait."""
        request, drafting, schedule = drafted_request(), Polled(concurrent=concurrent), FixedRounds(rounds)
        manager = self.manager(drafting, schedule)
        manager.receive_growth({1: request}, [request] if draws else ())
        assert drafting.polls == manager.grafted == polls + rounds * draws
        assert schedule.waits == [[request]] * draws

    def test_a_paused_draft_is_not_waited_for(self) -> None:
        request, schedule = drafted_request(), FixedRounds(1)
        request.paused = True
        self.manager(Polled(concurrent=True), schedule).receive_growth({1: request}, [request])
        assert not schedule.waits

    def test_a_finished_draft_is_not_polled_again(self) -> None:
        """A lookup sends all its nodes at once; another poll would only cost time."""
        request, drafting = drafted_request(), Polled(concurrent=False, more=False)
        self.manager(drafting, FixedRounds(5)).receive_growth({1: request}, [request])
        assert drafting.polls == request.tree.size == 1

    @pytest.mark.parametrize(("stale", "polls", "grafted"), [(0, 1, 1), (2, 3, 1), (50, 8, 0)])
    def test_a_wait_ends_with_new_nodes_or_after_its_time(self, stale: int, polls: int, grafted: int) -> None:
        """The first growth after a commit may be that of the tree before, which joins nothing. A poll takes 0.125 s."""

        class Behind(NoDraftClient):
            """Has nothing before the wait."""

            concurrent, polls = True, -1

            def poll(self, timeout_s: float) -> PollResult:
                self.polls += 1
                base = 1 if self.polls <= stale else 2
                growths = [(1, Growth(base, 1, [0], [5], [-0.1]))] if self.polls else []
                return PollResult(growths, may_continue=True)

        request, drafting = drafted_request(), Behind()
        manager = DraftManager(drafting, (), UNGATED, FixedRounds(1), 10, lambda: drafting.polls / 8)
        manager.receive_growth({1: request}, [request])
        assert (drafting.polls, manager.grafted, manager.waited_s) == (polls, grafted, polls / 8)

    def test_a_local_draft_runs_one_round_though_lookups_have_guessed_the_same(self) -> None:
        request, lookup, drafting = drafted_request(), Polled(concurrent=False), Polled(concurrent=False)
        manager = DraftManager(drafting, (lookup,), UNGATED, FixedRounds(1), 10, lambda: 0.0)
        manager.receive_growth({1: request}, [request])
        assert lookup.polls == drafting.polls == manager.grafted == request.tree.size == 1
