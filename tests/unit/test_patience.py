"""Patience waits where it learned that waiting pays, and never stops learning."""

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
from paceline.engine.request import POOL_SOURCE, Request
from tests.helpers.bare import bare_request

DELAY_S = 1e-3
STEP_S = 10e-3
PASSES = RowCost([1, 100], [STEP_S, STEP_S])
ROOM = 100


def pays(patience: WaitPolicy, height: int = 0) -> bool:
    """Whether it waits with a step of one sure token ahead."""
    return patience.wait_s(height, 1.0, STEP_S) > 0


def disappoint(patience: WaitPolicy, height: int = 0, times: int = 50) -> None:
    for _ in range(times):
        patience.observe(height, 0.0, DELAY_S)


def test_it_starts_hopeful_and_less_so_with_height() -> None:
    patience = WaitPolicy(DELAY_S)
    assert pays(patience)
    worth = [patience.wait_s(h, 2.0, STEP_S) > 0 for h in range(WaitPolicy.MAX_HEIGHT + 5)]
    assert worth == sorted(worth, reverse=True)
    assert not worth[WaitPolicy.MAX_HEIGHT]


def test_a_wait_is_bounded_by_what_is_usual() -> None:
    patience = WaitPolicy(DELAY_S)
    assert patience.wait_s(0, 1.0, STEP_S) == pytest.approx(WaitPolicy.TIMEOUT_FACTOR * DELAY_S)
    for _ in range(100):
        patience.observe(0, 0.9, 3 * DELAY_S)
    assert patience.wait_s(0, 1.0, STEP_S) == pytest.approx(WaitPolicy.TIMEOUT_FACTOR * 3 * DELAY_S, rel=1e-3)


def test_it_waits_exactly_while_what_would_be_lost_exceeds_what_the_step_earns() -> None:
    patience = WaitPolicy(DELAY_S)
    for _ in range(200):
        patience.observe(2, 0.5, DELAY_S)  # 500 tokens per second, of which half are lost by going ahead
    assert patience.wait_s(2, expected=2.4, step_s=STEP_S) > 0  # 240 per second without waiting
    assert patience.wait_s(2, expected=2.6, step_s=STEP_S) == 0


def test_waiting_in_vain_ends_it() -> None:
    patience = WaitPolicy(DELAY_S)
    disappoint(patience)
    assert not pays(patience)
    assert pays(patience, height=1), "another height has its own experience"


def test_what_was_given_up_is_tried_again() -> None:
    """A height that is never waited for would never be learned about again."""
    patience = WaitPolicy(DELAY_S)
    disappoint(patience)
    assert any(pays(patience) for _ in range(20_000))


def test_trying_again_is_rare_while_it_stays_in_vain() -> None:
    patience = WaitPolicy(DELAY_S)
    tries = 0
    for _ in range(2000):
        if pays(patience):
            tries += 1
            patience.observe(0, 0.0, WaitPolicy.TIMEOUT_FACTOR * DELAY_S)
    assert tries < 100


def test_a_draft_that_hung_is_waited_for_again() -> None:
    """Waits in vain lengthen the usual delay; if that never shrank, there would never be another wait."""
    patience = WaitPolicy(DELAY_S)
    for _ in range(100):
        patience.observe(0, 0.0, 1.0)
    assert not pays(patience)
    assert any(pays(patience) for _ in range(20_000))


class TestTheNextRound:
    """Of a draft that has no time but the target's."""

    def test_it_pays_exactly_while_it_brings_more_per_second_than_the_step(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(300):
            rounds.observe(0.5, 0.35, DELAY_S)  # 0.7 for each token of the frontier
        assert rounds.pays(frontier=0.4, expected=2.7, step_s=STEP_S)  # 280 per second against 270
        assert not rounds.pays(frontier=0.4, expected=2.9, step_s=STEP_S)
        assert not rounds.pays(frontier=0.3, expected=2.7, step_s=STEP_S), "what follows is less likely"

    def test_rows_of_its_guesses_are_part_of_what_a_round_costs(self) -> None:
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

    def test_what_follows_unlikely_guesses_teaches_little(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(20):
            rounds.observe(0.001, 0.0, DELAY_S)
        assert rounds.pays(0.5, 2.0, STEP_S)
        for _ in range(20):
            rounds.observe(0.9, 0.0, DELAY_S)
        assert not rounds.pays(0.5, 2.0, STEP_S)

    def test_nothing_is_expected_where_nothing_may_follow(self) -> None:
        assert not InlineRoundPolicy(DELAY_S).pays(0.0, 1.0, STEP_S)

    @pytest.mark.parametrize(("beyond", "worth"), [(0.0, 0.7), (0.5, 0.2), (0.7, 0.0), (0.9, 0.0)])
    def test_what_others_have_guessed_is_not_brought(self, beyond: float, worth: float) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(300):
            rounds.observe(0.5, 0.35, DELAY_S)
        assert not rounds.pays(1.0, 2.0, 2.0 * DELAY_S / (1.01 * worth + 1e-6), beyond)
        if worth:
            assert rounds.pays(1.0, 2.0, 2.0 * DELAY_S / (0.99 * worth), beyond)

    def test_a_draft_that_was_useless_is_tried_again(self) -> None:
        rounds = InlineRoundPolicy(DELAY_S)
        for _ in range(100):
            rounds.observe(1.0, 0.0, 50 * DELAY_S)
        assert not rounds.pays(1.0, 1.0, STEP_S)
        assert any(rounds.pays(1.0, 1.0, STEP_S) for _ in range(20_000))


@dataclass
class Turns:
    """One request after the other, each for one step. Its pass is said to take 10 ms. A round of its draft adds a guess
    to a chain; four are allowed."""

    concurrent: bool = False
    round_s: float = 4e-3
    step_s: float = STEP_S
    first_s: float | None = None
    """What the first round takes of each but the last, whose draft has read its prompt before; as any, if None."""
    beside: Growth | None = None
    """What others guess before the draft gets its turn."""

    def rounds(self) -> int:
        """How many the last of them gets."""
        now = [0.0]
        cost = StepCost(PASSES)
        waiting = make_draft_schedule(self.concurrent, False, cost, lambda: now[0])
        for turn in range(60):
            request = bare_request([1, 2, 3], draft="somebody")
            request.draft_started, tree = turn == 59, request.tree
            made: list[int] = []
            if self.beside:
                tree.graft(self.beside, ROOM, POOL_SOURCE + 1)

            def receive(_: float, request: Request = request, tree: TokenTree = tree, made: list[int] = made) -> bool:
                now[0] += self.round_s if request.draft_started or self.first_s is None else self.first_s
                made.append(len(made) + 1)
                request.draft_started = True
                tree.graft(Growth(2, made[-1], [made[-1] - 1], [5], [-0.01]), ROOM)
                return True

            waiting.wait([request], receive)
            cost.observe(1 + tree.size, self.step_s)
        return len(made)


@pytest.mark.parametrize(("concurrent", "round_s", "rounds"), [(False, 4e-3, 4), (False, 1.0, 0), (True, 4e-3, 1)])
def test_a_draft_on_the_target_s_time_goes_on_while_that_pays(concurrent: bool, round_s: float, rounds: int) -> None:
    """A draft that goes on by itself is waited for less."""
    assert Turns(concurrent, round_s).rounds() == rounds


def test_a_first_round_reads_a_prompt_and_is_not_how_long_rounds_take() -> None:
    assert Turns(first_s=1.0).rounds() == 4


@pytest.mark.parametrize(
    ("chance", "depth", "rounds"),
    [(0.3, 4, 4), (0.99, 4, 0)],
    ids=["unlikely", "sure"],
)
def test_guesses_of_others_spare_a_round_only_where_they_are_as_good(chance: float, depth: int, rounds: int) -> None:
    """Others have guessed a chain of `depth`. Rounds that guess the same bring nothing, but those after them may."""
    others = Growth(2, 1, range(depth), [5] * depth, [math.log(chance)] * depth)
    assert Turns(round_s=1e-3, beside=others).rounds() == rounds


def test_in_lock_step_a_draft_that_goes_on_with_nothing_is_not_waited_for_for_ever() -> None:
    """It held the engine, and all requests with it, for as long as it liked."""
    now, patience = [0.0], list[float]()
    waiting = make_draft_schedule(True, True, StepCost(PASSES), lambda: now[0])
    request = bare_request([1, 2, 3], draft="somebody")

    def receive(timeout_s: float) -> bool:
        assert now[0] < LockstepSchedule.TIMEOUT_S
        patience.append(timeout_s)
        now[0] += 0.3
        return True

    waiting.wait([request], receive)
    assert patience == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_a_round_that_reads_a_prompt_is_not_how_long_rounds_take() -> None:
    rounds = InlineRoundPolicy(DELAY_S)
    for _ in range(100):
        rounds.observe(1.0, 0.8, DELAY_S)
    rounds.observe(1.0, 0.8, 1.0)
    assert rounds.pays(0.5, 2.0, STEP_S)


@pytest.mark.parametrize(("step_s", "rounds"), [(STEP_S, 0), (4 * STEP_S, 4)])
def test_what_steps_take_beside_their_pass_counts(step_s: float, rounds: int) -> None:
    """A round of 15 ms is too much beside a step of 10, not beside one of 40, whatever its pass takes."""
    assert Turns(round_s=15e-3, step_s=step_s).rounds() == rounds
