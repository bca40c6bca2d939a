"""Which nodes are worth a row: against brute force; what rows cost; what a draft's confidence is worth."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.policy.calibration import Calibration
from paceline.core.policy.min_path_probability import MinPathProbability
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify

COST = RowCost([8, 16, 32], [1.0, 1.5, 4.0])
FLAT = RowCost([8, 256], [1.0, 1.0])


class TestRowCost:
    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [
            (1, 1.0),  # as the fewest that were measured
            (8, 1.0),
            (9, 1.0625),  # an eighth of the way from 8 to 16
            (16, 1.5),
            (24, 2.75),  # half-way between 16 and 32
            (32, 4.0),
            (40, 5.0),  # beyond what was measured: proportional
            (64, 8.0),
        ],
    )
    def test_between_and_beyond_the_measured_points(self, rows: int, seconds: float) -> None:
        assert COST(rows) == COST.table(rows)[rows] == pytest.approx(seconds)

    def test_a_measurement_that_was_disturbed_makes_no_step(self) -> None:
        """Noise makes times longer only: 16 rows cannot have needed more than 24 did."""
        noisy = RowCost([8, 16, 24, 32], [1.0, 3.0, 2.0, 4.0])
        assert [noisy(rows) for rows in (8, 12, 16, 24, 32)] == [1.0, 1.5, 2.0, 2.0, 4.0]

    def test_a_curve_with_steps_is_followed_row_by_row(self) -> None:
        steps = RowCost([1, 8, 9, 16], [1.0, 1.0, 2.0, 2.0])
        assert steps.table(3) == [steps(rows) for rows in range(7)]
        assert steps.table(16)[1:17] == [1.0] * 8 + [2.0] * 8

    @given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6), st.lists(st.integers(1, 400), min_size=2))
    def test_it_never_falls(self, seconds: list[float], rows: list[int]) -> None:
        cost = RowCost([8 * (i + 1) ** 2 for i in range(len(seconds))], seconds)
        times = [cost(r) for r in sorted(rows)]
        assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times))

    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [([], []), ([8], [1.0, 2.0]), ([8, 8], [1.0, 1.0]), ([16, 8], [1.0, 2.0]), ([8], [0.0]), ([8], [-1.0])],
    )
    def test_nonsense_is_refused(self, rows: list[int], seconds: list[float]) -> None:
        with pytest.raises(ValueError, match="rising row counts"):
            RowCost(rows, seconds)


class TestStepCost:
    """Around passes that take a second, whatever their rows."""

    def learned(self, steps: int, seconds: Callable[[int], float]) -> StepCost:
        cost = StepCost(FLAT)
        draws = random.Random(3)
        for _ in range(steps):
            rows = draws.randrange(8, 60)
            cost.observe(rows, seconds(rows))
        return cost

    def test_unless_something_is_learned_it_is_the_pass(self) -> None:
        assert StepCost(COST)(24) == COST(24)

    def test_what_a_step_takes_beside_its_pass_is_learned(self) -> None:
        assert self.learned(400, lambda _: 1.3)(30) == pytest.approx(1.3, rel=0.02)

    def test_what_a_step_takes_beside_its_pass_is_never_negative(self) -> None:
        assert self.learned(400, lambda _: 0.5)(30) == 1.0

    def test_a_stall_counts_only_in_part(self) -> None:
        cost = self.learned(400, lambda _: 1.3)
        before = cost(60)
        cost.observe(60, 1000.0)
        assert cost(60) < 1.1 * before

    def test_it_follows_a_machine_that_changes(self) -> None:
        cost = self.learned(400, lambda _: 1.3)
        for step in range(600):
            cost.observe(8 + step % 50, 1.05)
        assert cost(30) == pytest.approx(1.05, rel=0.05)

    def test_what_guesses_take_is_learned_from_steps_with_more_and_fewer(self) -> None:
        cost, draws = StepCost(FLAT), random.Random(4)
        for _ in range(400):
            guesses = draws.choice([0, 0, 1, 4, 9])
            cost.observe(8 + guesses, draws.uniform(0.9, 1.1) * 0.3 + 1 + 0.02 * guesses, guesses)
        assert cost.node_overhead_s == pytest.approx(0.02, rel=0.2)
        assert cost(20, 10) == pytest.approx(1 + 0.3 + 0.2, rel=0.03)
        assert cost(20) == pytest.approx(1 + 0.3, rel=0.03)

    def test_steps_with_equally_many_guesses_tell_nothing_of_what_one_takes(self) -> None:
        cost = StepCost(FLAT)
        for _ in range(400):
            cost.observe(13, 1.5, 5)
        assert cost.node_overhead_s == pytest.approx(0.0, abs=1e-9)
        assert cost(13, 5) == pytest.approx(1.5)

    def test_the_rest_is_never_negative_however_many_guesses_there_are(self) -> None:
        cost = StepCost(FLAT)
        for step in range(400):
            guesses = 4 + step % 3
            cost.observe(8 + guesses, 1 + 0.1 * (guesses - 4), guesses)
            assert min(cost.overhead_s, cost.node_overhead_s) >= 0
        assert cost(13, 5) == pytest.approx(1.1, rel=0.02)

    def test_drafting_costs_the_tokens_that_plain_steps_would_have_drawn(self) -> None:
        cost = StepCost(FLAT)
        cost.observe_plain(8, 1.75)  # the machine was slower then
        for _ in range(200):
            cost.observe(20, 3.0)
            cost.observe_plain(8, 1.25)
        assert cost.tokens_lost(8, 2.5) == pytest.approx(8)
        assert cost.tokens_lost(8, 1.0) == 0.0
        assert cost.tokens_lost(8, 1e6) == 8 * StepCost.MAX_LOST_STEPS

    def test_drafted_steps_without_guesses_count_as_plain_until_one_without_a_draft_is_seen(self) -> None:
        cost = StepCost(FLAT)
        cost.observe_plain(1, 1.5, drafted=True)
        assert cost.tokens_lost(1, 3.0) == pytest.approx(1)
        cost.observe_plain(1, 1.25)
        assert cost.tokens_lost(1, 2.5) == pytest.approx(1)
        cost.observe_plain(1, 2.0, drafted=True)
        assert cost.tokens_lost(1, 2.5) == pytest.approx(1)

    def test_before_a_plain_step_was_seen_it_is_taken_to_be_its_pass(self) -> None:
        assert self.learned(400, lambda _: 1.5).tokens_lost(1, 3.0) == pytest.approx(2)


class TestPrice:
    def test_with_rows_to_spare_everything_is_wanted(self) -> None:
        price = MinPathProbability()
        assert not any(price.observe(0.0) for _ in range(100))
        assert price.min_path_probability == 0.0

    def test_it_follows_what_is_refused_in_few_words(self) -> None:
        price = MinPathProbability()
        told = [step for step in range(200) if price.observe(0.5)]
        assert 0.25 * MinPathProbability.MARGIN < price.min_path_probability < MinPathProbability.MARGIN
        assert len(told) < 6
        back = [step for step in range(200) if price.observe(0.0)]
        assert price.min_path_probability < 1e-3
        assert len(back) < 12

    def test_what_hardly_changes_is_not_told(self) -> None:
        price = MinPathProbability()
        for _ in range(100):
            price.observe(0.5)
        assert not any(price.observe(0.4 + 0.2 * (step % 2)) for step in range(200))


probabilities = st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda ps: sorted(ps, reverse=True))
costs = st.lists(st.floats(1e-3, 1e3), min_size=6, max_size=6).map(
    lambda seconds: RowCost([1, 2, 5, 16, 32, 64], seconds)
)


def step_cost(passes: RowCost, rest_s: float = 0.0, guess_s: float = 0.0) -> StepCost:
    cost = StepCost(passes)
    cost.overhead_s, cost.node_overhead_s = rest_s, guess_s
    return cost


class TestWorthwhile:
    @given(
        probabilities,
        st.integers(0, 20),
        st.integers(0, 60),
        st.integers(0, 50),
        costs,
        st.floats(0.0, 10.0),
        st.floats(0.0, 1.0),
    )
    def test_no_other_number_of_nodes_earns_more(
        self,
        offers: list[float],
        requests: int,
        prompt_rows: int,
        most: int,
        passes: RowCost,
        rest_s: float,
        guess_s: float,
    ) -> None:
        cost = step_cost(passes, rest_s, guess_s)
        rows = max(requests + prompt_rows, 1)

        def rate(count: int) -> float:
            return (requests + sum(offers[:count])) / cost(rows + count, count)

        chosen = nodes_to_verify(offers, requests, rows, most, cost)
        assert 0 <= chosen <= min(most, len(offers))
        assert rate(chosen) >= max(rate(n) for n in range(min(most, len(offers)) + 1)) * (1 - 1e-8)

    @given(st.lists(st.floats(0.0, 1.0), max_size=7), st.integers(1, 3), st.integers(1, 7), costs)
    def test_no_other_set_of_nodes_earns_more(
        self, offers: list[float], requests: int, most: int, cost: RowCost
    ) -> None:
        falling = sorted(offers, reverse=True)
        chosen = falling[: nodes_to_verify(falling, requests, requests, most, StepCost(cost))]
        earned = (requests + sum(chosen)) / cost(requests + len(chosen))
        for size in range(min(most, len(offers)) + 1):
            for nodes in itertools.combinations(offers, size):
                assert earned >= (requests + sum(nodes)) / cost(requests + size) * (1 - 1e-8)

    def test_each_row_has_a_price_of_its_own(self) -> None:
        """A row costs a tenth of the first: a guess that is likelier is worth it, unless many others wait for it."""
        dear = RowCost([1, 101], [1.0, 11.0])
        assert nodes_to_verify([0.5, 0.2, 0.05], 1, 1, 20, StepCost(dear)) == 2
        assert nodes_to_verify([0.5, 0.2, 0.05], 4, 4, 20, StepCost(dear)) == 1

    def test_rows_that_are_paid_for_by_steps_are_free(self) -> None:
        steps = RowCost([8, 9, 16, 17], [1.0, 50.0, 50.0, 100.0])
        assert nodes_to_verify([0.01] * 20, 1, 1, 20, StepCost(steps)) == 7
        assert nodes_to_verify([0.01] * 20, 1, 9, 20, StepCost(steps)) == 7

    def test_hopeless_nodes_are_not_worth_another_step(self) -> None:
        steps = RowCost([8, 9, 16], [1.0, 1.5, 1.5])
        assert nodes_to_verify([0.9] * 7 + [0.01] * 8, 1, 1, 50, StepCost(steps)) == 7
        assert nodes_to_verify([0.9] * 7 + [0.9] * 8, 1, 1, 50, StepCost(steps)) == 15

    def test_of_as_many_tokens_per_second_the_fewest_rows_bring_them(self) -> None:
        """Rounding alone decided otherwise between 8 rows and 30 of guesses that are all alike."""
        assert nodes_to_verify([0.3] * 40, 0, 0, 40, StepCost(RowCost([8], [1.0]))) == 8

    def test_beside_what_a_step_takes_anyway_a_row_is_cheap(self) -> None:
        dear = RowCost([1, 101], [1.0, 11.0])
        assert nodes_to_verify([0.5, 0.2, 0.05], 1, 1, 20, step_cost(dear, 3.0)) == 3
        assert nodes_to_verify([0.5, 0.2, 0.05], 1, 1, 20, step_cost(dear, 3.0, 0.5)) == 2

    def test_high_load_backs_off(self) -> None:
        """The same guesses, worth a bucket to one request, are not to 32 that pay for it by their own delay."""
        offers = [0.6] * 16
        assert nodes_to_verify(offers, 1, 1, 50, StepCost(COST)) == 15
        assert nodes_to_verify(offers, 32, 32, 50, StepCost(COST)) == 0

    def test_the_rows_that_are_left_bound_it(self) -> None:
        assert nodes_to_verify([1.0] * 20, 1, 1, 3, StepCost(FLAT)) == 3
        assert nodes_to_verify([1.0] * 20, 1, 1, 0, StepCost(FLAT)) == 0
        assert nodes_to_verify([], 1, 1, 10, StepCost(FLAT)) == 0


def cell(probability: float, rank: int = 0, depth: int = 1) -> int:
    return Calibration().cache[math.log(probability), rank, depth][0]


def believed(calibration: Calibration, probability: float, rank: int = 0, depth: int = 1) -> float:
    return math.exp(calibration.cache[math.log(probability), rank, depth][1])


PLACES = list(itertools.product((0, 1, 2, 7), (1, 2, 3, 4, 7, 8, 500)))
"""Ranks and depths."""


class TestCalibration:
    @pytest.mark.parametrize(("rank", "depth"), PLACES)
    def test_at_first_it_believes_the_draft(self, rank: int, depth: int) -> None:
        calibration = Calibration()
        for probability in (0.01, 0.3, 0.99, 1.0):
            assert believed(calibration, probability, rank, depth) == pytest.approx(probability)

    @pytest.mark.parametrize("claimed", [0.95, 0.3])
    def test_it_learns_what_a_claim_is_worth(self, claimed: float) -> None:
        calibration = Calibration()
        rng = random.Random(1)
        for _ in range(3000):
            calibration.observe(cell(claimed), rng.random() < 0.6)
        assert believed(calibration, claimed) == pytest.approx(0.6, abs=0.05)
        assert believed(calibration, 0.05) == pytest.approx(0.05), "other claims are another matter"

    @pytest.mark.parametrize(
        "drawn", [{(0, 1): 0.7, (1, 1): 0.3, (2, 1): 0.1}, {(0, 1): 0.9, (0, 3): 0.6, (0, 8): 0.2}]
    )
    def test_it_learns_what_ranks_and_depths_are_worth(self, drawn: dict[tuple[int, int], float]) -> None:
        """The draft claims the same of all. What tells only claims apart believes in the mean of them all."""
        calibration, blind = Calibration(), Calibration()
        rng = random.Random(1)
        beliefs: dict[tuple[int, int], list[float]] = {place: [] for place in drawn}
        blindly: list[float] = []
        for _ in range(3000):  # it forgets on purpose, so that what it believes wavers about the truth
            for (rank, depth), share in drawn.items():
                hit = rng.random() < share
                calibration.observe(cell(0.42, rank, depth), hit)
                blind.observe(cell(0.42), hit)
                beliefs[rank, depth].append(believed(calibration, 0.42, rank, depth))
                blindly.append(believed(blind, 0.42))
        for place, share in drawn.items():
            assert statistics.mean(beliefs[place][300:]) == pytest.approx(share, abs=0.06)
            assert statistics.stdev(beliefs[place][300:]) < 0.06
        assert max(abs(statistics.mean(blindly) - share) for share in drawn.values()) > 0.2

    def test_a_cell_of_which_nothing_is_known_is_like_its_bin(self) -> None:
        calibration = Calibration()
        for i in range(1000):
            calibration.observe(cell(0.42, rank=0), i % 5 > 0)
            calibration.observe(cell(0.42, rank=1), i % 5 > 2)
        assert believed(calibration, 0.42, rank=2, depth=9) == pytest.approx(0.6, abs=0.03)
        for _ in range(3):
            calibration.observe(cell(0.42, rank=2, depth=9), accepted=False)
        assert 0.3 < believed(calibration, 0.42, rank=2, depth=9) < 0.5, "a few guesses count for as many"

    def test_it_follows_a_draft_that_changes(self) -> None:
        calibration = Calibration()
        for _ in range(100_000):
            calibration.observe(cell(0.7), accepted=True)
        for _ in range(200):
            calibration.observe(cell(0.7), accepted=False)
        assert believed(calibration, 0.7) < 0.15
        assert believed(calibration, 0.7, rank=1) < 0.15, "so does the bin"

    @given(st.floats(-2e4, 0.0), st.integers(0, 9), st.integers(1, 600), st.lists(st.booleans(), max_size=30))
    def test_it_stays_a_probability(self, log_prob: float, rank: int, depth: int, outcomes: list[bool]) -> None:
        calibration = Calibration()
        for outcome in outcomes:
            calibration.observe(calibration.cache[log_prob, rank, depth][0], outcome)
        assert -math.inf < calibration.cache[log_prob, rank, depth][1] <= 0.0

    @given(
        st.lists(st.tuples(st.sampled_from(PLACES), st.booleans()), max_size=60),
        st.sampled_from(PLACES),
        st.booleans(),
    )
    def test_hits_and_a_surer_draft_make_a_guess_likelier_and_misses_do_not(
        self, outcomes: list[tuple[tuple[int, int], bool]], place: tuple[int, int], hit: bool
    ) -> None:
        calibration = Calibration()
        for (rank, depth), outcome in outcomes:
            calibration.observe(cell(0.42, rank, depth), outcome)
        before = believed(calibration, 0.42, *place)
        assert believed(calibration, 0.41, *place) <= before <= believed(calibration, 0.44, *place)
        calibration.observe(cell(0.42, *place), accepted=hit)
        after = believed(calibration, 0.42, *place)
        assert after >= before if hit else after <= before

    def test_cells_go_by_bin_then_rank_then_depth(self) -> None:
        """What is stored is in this order: another one needs another name there."""
        claims = [math.log(i / 20 + 0.01) for i in range(20)]
        cells = [Calibration().cache[c, rank, depth][0] for c in claims for rank in (0, 1, 2) for depth in (1, 2, 4, 8)]
        assert cells == list(range(Calibration.CELLS)) == list(range(240))

    def test_cells_cover_everything(self) -> None:
        assert Calibration().cache[0.0, 99, 999][0] == Calibration.CELLS - 1
        assert Calibration().cache[-1e4, 0, 1][0] == 0
        assert [cell(0.01, 0, depth) for depth in range(1, 10)] == [0, 1, 1, 2, 2, 2, 2, 3, 3]

    def test_hearsay_is_believed_until_something_is_seen(self) -> None:
        calibration = Calibration()
        drafted, accepted = [0.0] * Calibration.CELLS, [0.0] * Calibration.CELLS
        drafted[cell(0.52)], accepted[cell(0.52)] = 1e6, 9e5
        calibration.seed(drafted, accepted)
        assert believed(calibration, 0.52) == pytest.approx(0.9, abs=0.05)
        assert believed(calibration, 0.52, rank=1, depth=3) == pytest.approx(0.9, abs=0.05), "all that is known"
        for _ in range(500):
            calibration.observe(cell(0.52), accepted=False)
        assert believed(calibration, 0.52) < 0.2

    def test_hearsay_of_a_cell_counts_in_its_bin_for_what_it_is(self) -> None:
        """A bin is as its guesses were, however many of each cell are believed."""
        calibration = Calibration()
        drafted, accepted = [0.0] * Calibration.CELLS, [0.0] * Calibration.CELLS
        drafted[cell(0.52)], accepted[cell(0.52)] = 9e5, 9e5
        drafted[cell(0.52, rank=1)] = 1e5
        calibration.seed(drafted, accepted)
        assert believed(calibration, 0.52, rank=2) == pytest.approx(0.9, abs=0.05)
        assert believed(calibration, 0.52, rank=1) < 0.1
        assert sum(calibration.drafted) == 2 * Calibration.MAX_COUNT

    @pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (20, 20), (239, 239), (480, 480), (240, 20), (20, 240)])
    def test_hearsay_of_another_shape_is_ignored(self, drafted: int, accepted: int) -> None:
        calibration = Calibration()
        calibration.seed([100.0] * drafted, [1.0] * accepted)
        assert believed(calibration, 0.52) == pytest.approx(0.52)

    def test_hearsay_may_be_nonsense(self) -> None:
        """More accepted than drafted, some of nothing: a probability all the same."""
        calibration = Calibration()
        calibration.seed([1.0] * 120 + [0.0] * 120, [7.0] * 240)
        assert believed(calibration, 0.3) <= 1.0
        assert believed(calibration, 0.7) == pytest.approx(0.7)
