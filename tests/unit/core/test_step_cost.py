"""Row cost, step cost, the choice of nodes (against brute force), and calibration."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify

COST = RowCost([8, 16, 32], [1.0, 1.5, 4.0])
FLAT = RowCost([8, 256], [1.0, 1.0])
DEAR = RowCost([1, 101], [1.0, 11.0])
STAIR = RowCost([8, 9, 16], [1.0, 1.5, 1.5])
STAIRS = RowCost([8, 9, 16, 17], [1.0, 50.0, 50.0, 100.0])
RANKS_AND_DEPTHS = list(itertools.product((0, 1, 2, 7), (1, 2, 3, 4, 7, 8, 500)))


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
        assert COST.table(rows)[:rows] == [COST(each) for each in range(rows)]

    def test_a_disturbed_measurement_is_capped(self) -> None:
        """Noise only makes times longer: 16 rows cannot take longer than 24."""
        noisy = RowCost([8, 16, 24, 32], [1.0, 3.0, 2.0, 4.0])
        assert [noisy(rows) for rows in (8, 12, 16, 24, 32)] == [1.0, 1.5, 2.0, 2.0, 4.0]

    @given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6), st.lists(st.integers(1, 400), min_size=2))
    def test_it_never_falls(self, seconds: list[float], rows: list[int]) -> None:
        cost = RowCost([8 * (i + 1) ** 2 for i in range(len(seconds))], seconds)
        times = [cost(r) for r in sorted(rows)]
        assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times))

    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [([], []), ([8], [1.0, 2.0]), ([8, 8], [1.0, 1.0]), ([16, 8], [1.0, 2.0]), ([8], [0.0]), ([8], [-1.0])],
    )
    def test_invalid_points_are_rejected(self, rows: list[int], seconds: list[float]) -> None:
        with pytest.raises(ValueError, match="rising row counts"):
            RowCost(rows, seconds)


class TestStepCost:
    """With passes that take one second for any number of rows."""

    @staticmethod
    def learned(steps: int, seconds: float) -> StepCost:
        cost, draws = StepCost(FLAT), random.Random(3)
        for _ in range(steps):
            cost.observe(draws.randrange(8, 60), seconds)
        return cost

    @pytest.mark.parametrize(
        ("steps", "seconds", "learned"),
        [(0, 1.3, 1.0), (400, 1.3, 1.3), (400, 0.5, 1.0)],
        ids=["the prior is the pass", "an overhead", "never a negative overhead"],
    )
    def test_it_learns_the_overhead(self, steps: int, seconds: float, learned: float) -> None:
        assert self.learned(steps, seconds)(30) == pytest.approx(learned, rel=0.02)

    def test_a_stall_counts_only_in_part(self) -> None:
        cost = self.learned(400, 1.3)
        before = cost(60)
        cost.observe(60, 1000.0)
        assert cost(60) < 1.1 * before

    def test_it_follows_a_machine_that_changes(self) -> None:
        cost = self.learned(400, 1.3)
        for step in range(600):
            cost.observe(8 + step % 50, 1.05)
        assert cost(30) == pytest.approx(1.05, rel=0.05)

    def test_it_learns_the_overhead_per_node(self) -> None:
        cost, draws = StepCost(FLAT), random.Random(4)
        for _ in range(400):
            nodes = draws.choice([0, 0, 1, 4, 9])
            cost.observe(8 + nodes, draws.uniform(0.9, 1.1) * 0.3 + 1 + 0.02 * nodes, nodes)
        assert cost.node_overhead_s == pytest.approx(0.02, rel=0.2)
        assert cost(20, 10) == pytest.approx(1 + 0.3 + 0.2, rel=0.03)
        assert cost(20) == pytest.approx(1 + 0.3, rel=0.03)

    def test_without_measured_passes_a_step_is_a_line_over_its_nodes(self) -> None:
        cost, draws = StepCost(), random.Random(4)
        for step in range(400):
            nodes = draws.choice([0, 0, 1, 4, 9])
            seconds = draws.uniform(0.9, 1.1) * 0.01 + 0.0005 * nodes
            cost.observe(8 + nodes, seconds, nodes)
            assert step or cost(8, 0) == pytest.approx(seconds)
        assert cost.node_overhead_s == pytest.approx(0.0005, rel=0.2)
        assert (cost(8), cost(18, 10)) == (pytest.approx(0.01, rel=0.03), pytest.approx(0.015, rel=0.05))
        cost.observe(8, 100.0)
        assert cost(8) < 0.011, "a stall counts only in part"

    def test_equal_node_counts_determine_no_slope(self) -> None:
        cost = StepCost(FLAT)
        for _ in range(400):
            cost.observe(13, 1.5, 5)
        assert cost.node_overhead_s == pytest.approx(0.0, abs=1e-9)
        assert cost(13, 5) == pytest.approx(1.5)

    def test_neither_overhead_is_ever_negative(self) -> None:
        cost = StepCost(FLAT)
        for step in range(400):
            nodes = 4 + step % 3
            cost.observe(8 + nodes, 1 + 0.1 * (nodes - 4), nodes)
            assert min(cost.overhead_s, cost.node_overhead_s) >= 0
        assert cost(13, 5) == pytest.approx(1.1, rel=0.02)

    def test_tokens_lost_are_those_of_plain_steps(self) -> None:
        assert self.learned(400, 1.5).tokens_lost(1, 3.0) == pytest.approx(2), "the prior of a plain step is its pass"
        cost = StepCost(FLAT)
        cost.observe_plain(8, 1.75)  # the machine was slower then
        for _ in range(200):
            cost.observe(20, 3.0)
            cost.observe_plain(8, 1.25)
        assert cost.tokens_lost(8, 2.5) == pytest.approx(8)
        assert cost.tokens_lost(8, 1.0) == 0.0
        assert cost.tokens_lost(8, 1e6) == 8 * StepCost.MAX_LOST_STEPS

    def test_drafted_steps_count_as_plain_until_a_step_without_draft(self) -> None:
        cost = StepCost(FLAT)
        for seconds, drafted, step_s in ((1.5, True, 3.0), (1.25, False, 2.5), (2.0, True, 2.5)):
            cost.observe_plain(1, seconds, drafted=drafted)
            assert cost.tokens_lost(1, step_s) == pytest.approx(1)


def step_cost(passes: RowCost, overhead_s: float = 0.0, node_overhead_s: float = 0.0) -> StepCost:
    cost = StepCost(passes)
    cost.overhead_s, cost.node_overhead_s = overhead_s, node_overhead_s
    return cost


probabilities = st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda ps: sorted(ps, reverse=True))
passes = st.lists(st.floats(1e-3, 1e3), min_size=6, max_size=6).map(lambda times: RowCost([1, 2, 5, 16, 32, 64], times))
costs = st.builds(step_cost, passes, st.floats(0.0, 10.0), st.floats(0.0, 1.0))


class TestNodesToVerify:
    @given(probabilities, st.integers(0, 20), st.integers(0, 60), st.integers(0, 50), costs)
    def test_no_other_number_of_nodes_earns_more(
        self, probs: list[float], requests: int, prompt_rows: int, most: int, cost: StepCost
    ) -> None:
        rows = max(requests + prompt_rows, 1)

        def rate(count: int) -> float:
            return (requests + sum(probs[:count])) / cost(rows + count, count)

        chosen = nodes_to_verify(probs, requests, rows, most, cost)
        assert 0 <= chosen <= min(most, len(probs))
        assert rate(chosen) >= max(rate(n) for n in range(min(most, len(probs)) + 1)) * (1 - 1e-8)

    @pytest.mark.parametrize(
        ("cost", "probs", "requests", "rows", "chosen"),
        [
            (step_cost(FLAT), [1.0] * 60, 1, 1, 50),  # the rows left are the limit
            (step_cost(FLAT), [], 1, 1, 0),
            (step_cost(DEAR), [0.5, 0.2, 0.05], 1, 1, 2),  # a further row costs a tenth of the first
            (step_cost(DEAR), [0.5, 0.2, 0.05], 4, 4, 1),  # four requests wait for it
            (step_cost(DEAR, 3.0), [0.5, 0.2, 0.05], 1, 1, 3),  # the step takes long anyway
            (step_cost(DEAR, 3.0, 0.5), [0.5, 0.2, 0.05], 1, 1, 2),  # each node has an overhead
            (step_cost(STAIRS), [0.01] * 20, 1, 1, 7),  # rows up to the next stair are free
            (step_cost(STAIRS), [0.01] * 20, 1, 9, 7),
            (step_cost(STAIR), [0.9] * 7 + [0.01] * 8, 1, 1, 7),  # improbable nodes do not pay for a stair
            (step_cost(STAIR), [0.9] * 15, 1, 1, 15),
            (step_cost(COST), [0.6] * 16, 1, 1, 15),
            (step_cost(COST), [0.6] * 16, 32, 32, 0),  # high load
            (step_cost(RowCost([8], [1.0])), [0.3] * 40, 0, 0, 8),  # of equal rates the fewest rows
        ],
    )
    def test_examples(self, cost: StepCost, probs: list[float], requests: int, rows: int, chosen: int) -> None:
        assert nodes_to_verify(probs, requests, rows, 50, cost) == chosen


def cell(probability: float, rank: int = 0, depth: int = 1) -> int:
    return Calibration().cache[math.log(probability), rank, depth][0]


def calibrated(calibration: Calibration, probability: float, rank: int = 0, depth: int = 1) -> float:
    return math.exp(calibration.cache[math.log(probability), rank, depth][1])


class TestCalibration:
    def test_the_prior_is_the_draft_probability(self) -> None:
        for probability, (rank, depth) in itertools.product((0.01, 0.3, 0.99, 1.0), RANKS_AND_DEPTHS):
            assert calibrated(Calibration(), probability, rank, depth) == pytest.approx(probability)

    @pytest.mark.parametrize(
        "drawn", [{(0, 1): 0.7, (1, 1): 0.3, (2, 1): 0.1}, {(0, 1): 0.9, (0, 3): 0.6, (0, 8): 0.2}]
    )
    def test_it_learns_the_acceptance_of_ranks_and_depths(self, drawn: dict[tuple[int, int], float]) -> None:
        """The draft gives all the same probability. Bins alone learn only the mean."""
        calibration, blind = Calibration(), Calibration()
        rng = random.Random(1)
        beliefs: dict[tuple[int, int], list[float]] = {cell_key: [] for cell_key in drawn}
        blindly: list[float] = []
        for _ in range(3000):  # old counts fade, so the estimate fluctuates
            for (rank, depth), share in drawn.items():
                accepted = rng.random() < share
                calibration.observe(cell(0.42, rank, depth), accepted)
                blind.observe(cell(0.42), accepted)
                beliefs[rank, depth].append(calibrated(calibration, 0.42, rank, depth))
                blindly.append(calibrated(blind, 0.42))
        for cell_key, share in drawn.items():
            assert statistics.mean(beliefs[cell_key][300:]) == pytest.approx(share, abs=0.06)
            assert statistics.stdev(beliefs[cell_key][300:]) < 0.06
        assert max(abs(statistics.mean(blindly) - share) for share in drawn.values()) > 0.2
        assert calibrated(calibration, 0.05) == pytest.approx(0.05), "other bins are independent"

    def test_an_empty_cell_is_like_its_bin(self) -> None:
        calibration = Calibration()
        for i in range(1000):
            calibration.observe(cell(0.42, rank=0), i % 5 > 0)
            calibration.observe(cell(0.42, rank=1), i % 5 > 2)
        assert calibrated(calibration, 0.42, rank=2, depth=9) == pytest.approx(0.6, abs=0.03)
        for _ in range(3):
            calibration.observe(cell(0.42, rank=2, depth=9), drawn=False)
        assert 0.3 < calibrated(calibration, 0.42, rank=2, depth=9) < 0.5, "a few observations weigh little"

    def test_it_follows_a_draft_that_changes(self) -> None:
        calibration = Calibration()
        for _ in range(100_000):
            calibration.observe(cell(0.7), drawn=True)
        for _ in range(200):
            calibration.observe(cell(0.7), drawn=False)
        assert calibrated(calibration, 0.7) < 0.15
        assert calibrated(calibration, 0.7, rank=1) < 0.15, "the bin follows, too"

    @given(st.floats(-2e4, 0.0), st.integers(0, 9), st.integers(1, 600), st.lists(st.booleans(), max_size=30))
    def test_it_stays_a_probability(self, log_prob: float, rank: int, depth: int, outcomes: list[bool]) -> None:
        calibration = Calibration()
        for outcome in outcomes:
            calibration.observe(calibration.cache[log_prob, rank, depth][0], outcome)
        assert -math.inf < calibration.cache[log_prob, rank, depth][1] <= 0.0

    @given(
        st.lists(st.tuples(st.sampled_from(RANKS_AND_DEPTHS), st.booleans()), max_size=60),
        st.sampled_from(RANKS_AND_DEPTHS),
        st.booleans(),
    )
    def test_it_rises_with_acceptance_and_draft_probability(
        self, outcomes: list[tuple[tuple[int, int], bool]], cell_key: tuple[int, int], accepted: bool
    ) -> None:
        calibration = Calibration()
        for (rank, depth), outcome in outcomes:
            calibration.observe(cell(0.42, rank, depth), outcome)
        before = calibrated(calibration, 0.42, *cell_key)
        assert calibrated(calibration, 0.41, *cell_key) <= before <= calibrated(calibration, 0.44, *cell_key)
        calibration.observe(cell(0.42, *cell_key), drawn=accepted)
        after = calibrated(calibration, 0.42, *cell_key)
        assert after >= before if accepted else after <= before

    def test_cells_go_by_bin_then_rank_then_depth(self) -> None:
        """Stored counts are in this order."""
        claims = [i / 20 + 0.01 for i in range(20)]
        cells = [cell(claim, rank, depth) for claim in claims for rank in (0, 1, 2) for depth in (1, 2, 4, 8)]
        assert cells == list(range(Calibration.CELLS)) == list(range(240))
        assert cell(1.0, 99, 999) == Calibration.CELLS - 1
        assert Calibration().cache[-1e4, 0, 1][0] == 0
        assert [cell(0.01, 0, depth) for depth in range(1, 10)] == [0, 1, 1, 2, 2, 2, 2, 3, 3]

    def test_seeded_counts_are_a_start(self) -> None:
        """A bin has the acceptance rate of all its nodes, before cells are capped."""
        calibration = Calibration()
        drafted, accepted = [0.0] * Calibration.CELLS, [0.0] * Calibration.CELLS
        drafted[cell(0.52)], accepted[cell(0.52)] = 9e5, 9e5
        drafted[cell(0.52, rank=1)] = 1e5
        calibration.start_from(drafted, accepted)
        assert calibrated(calibration, 0.52, rank=2) == pytest.approx(0.9, abs=0.05)
        assert calibrated(calibration, 0.52, rank=1) < 0.1
        assert sum(calibration.drafted) == 2 * Calibration.MAX_COUNT
        for _ in range(500):
            calibration.observe(cell(0.52), drawn=False)
        assert calibrated(calibration, 0.52) < 0.2

    @pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (20, 20), (239, 239), (480, 480), (240, 20), (20, 240)])
    def test_seeds_of_another_shape_are_ignored(self, drafted: int, accepted: int) -> None:
        calibration = Calibration()
        calibration.start_from([100.0] * drafted, [1.0] * accepted)
        assert calibrated(calibration, 0.52) == pytest.approx(0.52)

    def test_impossible_seeds_give_probabilities(self) -> None:
        """More accepted than drafted nodes."""
        calibration = Calibration()
        calibration.start_from([1.0] * 120 + [0.0] * 120, [7.0] * 240)
        assert calibrated(calibration, 0.3) <= 1.0
        assert calibrated(calibration, 0.7) == pytest.approx(0.7)
