"""The lossy strategies: cases computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.logits_rules import History
from paceline.core.sampling import draw
from paceline.core.strategies.lossy import LogitComparison, RelaxedThinking, TypicalAcceptance, longest_accepted_path
from paceline.core.strategies.synthetic import SyntheticAcceptance, conditional_rate
from paceline.core.strategies.verifier import VerificationInput, Verifier
from tests.exactness.verification_inputs import verification_input

SEEDS = range(40)
HOT = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def committed(rule: Verifier, logits: Tensor, each: VerificationInput) -> list[int]:
    """`logits`: the same [V] after every token, or those of each row [R, V]."""
    [verdict] = rule.verify(logits.expand(len(each.rows), -1), [each])
    return verdict.tokens(each.tree)


def accepted(rule: Verifier, logits: Tensor, each: VerificationInput) -> int:
    return len(committed(rule, logits, each)) - 1


def drawn(logits: Tensor, seed: int) -> int:
    """What the target draws after the root."""
    return int(draw(logits[None], verification_input(seeded(seed), len(logits)).rows))


def seeded(seed: int, **settings: float) -> SamplingParams:
    return SamplingParams(seed=seed, **settings)


class TestTypicalAcceptance:
    """Entropy of (1/2, 1/2 - 0.04, 0.04) is 0.8325 nats: 0.3 exp(-0.8325) = 0.1305, so the threshold is 0.09."""

    LOGITS = logits_of(0.5, 0.46, 0.04)
    RULE = TypicalAcceptance(0.09, 0.3)

    @pytest.mark.parametrize(("token", "passes"), [(0, True), (1, True), (2, False)])
    def test_the_threshold(self, token: int, passes: bool) -> None:
        for seed in SEEDS:
            each = verification_input(seeded(seed), 3, [token])
            assert accepted(self.RULE, self.LOGITS, each) == (passes or drawn(self.LOGITS, seed) == token)

    def test_the_threshold_falls_with_entropy(self) -> None:
        """100 tokens alike: entropy is log 100, and alpha exp(-log 100) = 0.003 is under 0.01."""
        requests = [verification_input(seeded(seed), 100, [7]) for seed in SEEDS]
        assert all(accepted(self.RULE, torch.zeros(100), each) for each in requests)
        strict = TypicalAcceptance(0.09, 1.1)  # 0.011
        assert sum(accepted(strict, torch.zeros(100), each) for each in requests) < 5

    @pytest.mark.parametrize(("settings", "count"), [({}, 1), ({"temperature": 0.5}, 0), ({"top_k": 2}, 0)])
    def test_the_distribution_is_the_request_s(self, settings: dict[str, float], count: int) -> None:
        """At temperature 1/2, 0.04 of 0.5 and 0.46 is less still; a filter leaves nothing."""
        each = verification_input(SamplingParams(**settings), 3, [2])
        assert accepted(TypicalAcceptance(0.03, 0.9), self.LOGITS, each) == count

    def test_at_temperature_0_it_is_greedy(self) -> None:
        assert committed(self.RULE, self.LOGITS, verification_input(GREEDY, 3, [1])) == [0]
        assert committed(self.RULE, self.LOGITS, verification_input(GREEDY, 3, [0])) == [0, 0]

    def test_the_longest_path_wins_and_then_the_likeliest(self) -> None:
        for seed in SEEDS:
            tokens = committed(
                self.RULE, logits_of(0.4, 0.3, 0.3), verification_input(seeded(seed), 3, [0], [1, 1], [2])
            )
            assert (tokens[:2], len(tokens)) == ([1, 1], 3)

    def test_without_nodes_it_draws(self) -> None:
        assert committed(self.RULE, self.LOGITS, verification_input(seeded(0), 3)) == [drawn(self.LOGITS, 0)]


PATHS: dict[str, tuple[list[list[int]], list[int], list[float], list[int]]] = {
    "a drawn token precedes an accepted one": ([[1], [2]], [2, 0, 3], [0.9, 0.1], [2, 3]),
    "the likelier of two siblings": ([[1], [2]], [4, 0, 3], [0.9, 0.1], [1, 0]),
    "the likelier of two siblings, the second": ([[1], [2]], [4, 0, 3], [0.1, 0.9], [2, 3]),
    "without accepted nodes it is coupled": ([[1, 2], [3]], [1, 2, 4, 0], [], [1, 2, 4]),
    "without accepted nodes it is coupled, another branch": ([[1, 2], [3]], [3, 2, 4, 0], [], [3, 0]),
    "without accepted nodes it is coupled, no branch": ([[1, 2], [3]], [4, 2, 4, 0], [], [4]),
    "nodes below a rejected one are not accepted": ([[1, 2]], [4, 2, 3], [0.0, 0.9], [4]),
}
"""Guesses, draws, probabilities of accepted nodes (0: it is not), and what is committed."""


@pytest.mark.parametrize(("paths", "draws", "probs", "expected"), PATHS.values(), ids=PATHS)
def test_the_longest_accepted_path_is_committed(
    paths: list[list[int]], draws: list[int], probs: list[float], expected: list[int]
) -> None:
    each = verification_input(HOT, 5, *paths)
    accepted_probs = {node: p for node, p in zip(each.verified, probs, strict=False) if p}
    assert longest_accepted_path(each, draws, accepted_probs).tokens(each.tree) == expected


class TestLogitComparison:
    LOGITS = logits_of(0.5, 0.3, 0.2)

    @pytest.mark.parametrize(
        ("draft", "eps", "passes"),
        [
            ({1: 2, 0: 8}, 1e-5, True),
            ({1: 3, 0: 7}, 1e-5, True),
            ({1: 31, 0: 69}, 1e-5, False),
            # Twice as sure, and eps is in nats.
            ({1: 60, 0: 40}, math.log(2) + 1e-3, True),
            ({1: 60, 0: 40}, math.log(2) - 1e-3, False),
            (None, 1e-5, False),  # a token without a distribution was certain
        ],
    )
    def test_the_target_may_not_find_a_token_less_probable(
        self, draft: dict[int, int] | None, eps: float, passes: bool
    ) -> None:
        for seed in SEEDS:
            each = verification_input(seeded(seed), 3, [1], distributions={1: draft} if draft else {})
            assert accepted(LogitComparison(eps), self.LOGITS, each) == (passes or drawn(self.LOGITS, seed) == 1)

    def test_impossible_tokens_are_never_accepted(self) -> None:
        each = verification_input(SamplingParams(top_k=1), 3, [1], distributions={1: {1: 1, 0: 60000}})
        assert accepted(LogitComparison(50.0), self.LOGITS, each) == 0


class TestRelaxedThinking:
    BEGIN, END = 8, 9
    LOGITS = logits_of(0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.005)

    def rule(self, topk: int = 3, delta: float = 0.35) -> RelaxedThinking:
        return RelaxedThinking(self.BEGIN, self.END, topk, delta)

    def accepted_tokens(self, rule: RelaxedThinking, prompt: list[int], *path: int) -> int:
        return accepted(rule, self.LOGITS, verification_input(GREEDY, 10, path, prompt=prompt))

    @pytest.mark.parametrize(
        ("topk", "delta", "tokens"), [(3, 0.35, {0, 1}), (3, 0.45, {0, 1, 2}), (2, 0.45, {0, 1}), (1, 0.6, {0})]
    )
    def test_topk_and_delta(self, topk: int, delta: float, tokens: set[int]) -> None:
        """Greedy, so that only the largest would stand otherwise: probabilities are those of temperature 1."""
        assert {t for t in range(8) if self.accepted_tokens(self.rule(topk, delta), [1, self.BEGIN], t)} == tokens

    @pytest.mark.parametrize(
        ("prompt", "thinking"),
        [([1, BEGIN, 4], True), ([1, 4], False), ([1, BEGIN, 4, END], False), ([1, BEGIN, END, BEGIN], True)],
    )
    def test_only_in_a_thinking_phase(self, prompt: list[int], thinking: bool) -> None:
        assert self.accepted_tokens(self.rule(), prompt, 1) == thinking

    def test_draft_tokens_begin_and_end_phases(self) -> None:
        wide = self.rule(topk=10, delta=1.0)
        assert self.accepted_tokens(wide, [1, self.BEGIN], 1, self.END, 1) == 2
        assert self.accepted_tokens(wide, [1], self.BEGIN, 1) == 0, "not in a thinking phase: the target has to draw it"
        each = verification_input(GREEDY, 10, [self.BEGIN, 1], prompt=[1])
        assert accepted(wide, self.LOGITS.roll(self.BEGIN), each) == 2, "now it does"

    def test_the_phase_follows_the_request(self) -> None:
        rule, history = self.rule(), History(GREEDY, [1], [], 10)
        for prompt, passes in (([1], 0), ([1, self.BEGIN], 1), ([1, self.BEGIN, 0], 1), ([1, 8, 0, self.END, 2], 0)):
            each = verification_input(GREEDY, 10, [1], prompt=prompt, history=history)
            assert accepted(rule, self.LOGITS, each) == passes

    def test_masked_and_filtered_tokens_are_never_accepted(self) -> None:
        barred = SamplingParams(temperature=0, bad_words=((1,),))
        for params in (barred, *(seeded(seed, top_k=1) for seed in SEEDS)):
            each = verification_input(params, 10, [1], prompt=[self.BEGIN])
            assert accepted(self.rule(10, 1.0), self.LOGITS, each) == 0


class TestSynthetic:
    @pytest.mark.parametrize("depths", [1, 2, 5, 16])
    @pytest.mark.parametrize("rate", [0.0, 0.1, 0.6, 0.95, 1.0])
    def test_conditional_rate_gives_the_mean_joint_rate(self, rate: float, depths: int) -> None:
        each = conditional_rate(rate, depths)
        assert sum(each**depth for depth in range(1, depths + 1)) / depths == pytest.approx(rate, abs=1e-9)

    def test_chains_are_accepted_at_that_rate(self) -> None:
        rule = SyntheticAcceptance(conditional_rate(0.5, 3))
        logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        counts = [accepted(rule, logits, verification_input(seeded(seed), 6, [1, 2, 3])) for seed in range(4000)]
        assert sum(counts) / 3 / len(counts) == pytest.approx(0.5, abs=0.03)

    def test_the_tokens_do_not_matter(self) -> None:
        for seed in SEEDS:
            ones, zeros = (verification_input(seeded(seed), 2, [token, token]) for token in (1, 0))
            rule, logits = SyntheticAcceptance(0.5), torch.tensor([0.0, -50.0])
            assert accepted(rule, logits, ones) == accepted(rule, logits, zeros)

    @pytest.mark.parametrize(("rate", "tokens"), [(1.0, [1, 2, 1]), (0.0, [1])])
    def test_always_and_never(self, rate: float, tokens: list[int]) -> None:
        """At 0 even what the target draws is not accepted, and at 1 the first of siblings is."""
        each = verification_input(GREEDY, 4, [1, 2], [3])
        assert committed(SyntheticAcceptance(rate), torch.tensor([0.0, 9.0, 0.0, 0.0]), each) == tokens
