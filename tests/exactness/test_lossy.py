"""The lossy strategies: cases computed by hand."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.sampling import History, draw
from paceline.core.strategies import make_verifier
from paceline.core.strategies.lossy import LogitComparison, RelaxedThinking, TypicalAcceptance, longest_accepted_path
from paceline.core.strategies.synthetic import SyntheticAcceptance, conditional_rate
from paceline.core.strategies.verifier import VerificationInput, Verifier
from paceline.engine.draft_client import NoDraftClient
from paceline.engine.engine import Engine
from paceline_lab.fake_models.table_model import TableModel
from tests.exactness.test_engine import FREE
from tests.helpers.verification_inputs import verification_input

SEEDS = range(40)
HOT = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def accepted(rule: Verifier, logits: Tensor, each: VerificationInput) -> int:
    [committed] = rule.verify(logits, [each])
    return len(committed) - 1


def draws_of(logits: Tensor, each: VerificationInput) -> list[int]:
    return draw(logits, each.rows).tolist()


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
            logits = self.LOGITS.expand(2, -1)
            drawn = draws_of(logits, each)[0]
            assert accepted(self.RULE, logits, each) == (passes or drawn == token)

    def test_the_threshold_falls_with_entropy(self) -> None:
        """100 tokens alike: entropy is log 100, and alpha exp(-log 100) = 0.003 is under 0.01."""
        logits = torch.zeros(2, 100)
        assert all(accepted(self.RULE, logits, verification_input(seeded(seed), 100, [7])) for seed in SEEDS)
        strict = TypicalAcceptance(0.09, 1.1)  # 0.011
        assert sum(accepted(strict, logits, verification_input(seeded(seed), 100, [7])) for seed in SEEDS) < 5

    def test_the_distribution_is_the_requests(self) -> None:
        """At temperature 1/2, 0.04 of 0.5 and 0.46 is less still; a filter leaves nothing."""
        for settings in ({"temperature": 0.5}, {"top_k": 2.0}):
            each = verification_input(SamplingParams(**settings), 3, [2])
            assert accepted(TypicalAcceptance(0.03, 0.9), self.LOGITS.expand(2, -1), each) == 0
        assert accepted(TypicalAcceptance(0.03, 0.9), self.LOGITS.expand(2, -1), verification_input(HOT, 3, [2])) == 1

    def test_at_temperature_0_it_is_greedy(self) -> None:
        logits = self.LOGITS.expand(2, -1)
        assert self.RULE.verify(logits, [verification_input(GREEDY, 3, [1])]) == [[0]]
        assert self.RULE.verify(logits, [verification_input(GREEDY, 3, [0])]) == [[0, 0]]

    def test_the_longest_path_wins_and_then_the_likeliest(self) -> None:
        logits = logits_of(0.4, 0.3, 0.3).expand(6, -1)
        for seed in SEEDS:
            each = verification_input(seeded(seed), 3, [0], [1, 1], [2])
            [tokens] = self.RULE.verify(logits[: len(each.rows)], [each])
            assert tokens[:2] == [1, 1]
            assert len(tokens) == 3

    def test_without_nodes_it_draws(self) -> None:
        each = verification_input(HOT, 3)
        assert self.RULE.verify(self.LOGITS[None], [each]) == [draws_of(self.LOGITS[None], each)]


class TestLongestAcceptedPath:
    def test_a_drawn_token_precedes_an_accepted_one(self) -> None:
        each = verification_input(HOT, 5, [1], [2])
        first, second = each.verified
        assert longest_accepted_path(each, [2, 0, 3], {first: 0.9, second: 0.1}) == [2, 3]
        assert longest_accepted_path(each, [4, 0, 3], {first: 0.9, second: 0.1}) == [1, 0]
        assert longest_accepted_path(each, [4, 0, 3], {first: 0.1, second: 0.9}) == [2, 3]

    def test_without_accepted_nodes_it_is_coupled(self) -> None:
        each = verification_input(HOT, 5, [1, 2], [3])
        assert longest_accepted_path(each, [1, 2, 4, 0], {}) == [1, 2, 4]
        assert longest_accepted_path(each, [3, 2, 4, 0], {}) == [3, 0]
        assert longest_accepted_path(each, [4, 2, 4, 0], {}) == [4]

    def test_nodes_below_a_rejected_one_are_not_accepted(self) -> None:
        each = verification_input(HOT, 5, [1, 2])
        _, second = each.verified
        assert longest_accepted_path(each, [4, 2, 3], {second: 0.9}) == [4]


class TestLogitComparison:
    LOGITS = logits_of(0.5, 0.3, 0.2)

    @pytest.mark.parametrize(("draft", "passes"), [({1: 2, 0: 8}, True), ({1: 3, 0: 7}, True), ({1: 31, 0: 69}, False)])
    def test_the_target_may_not_find_a_token_less_probable(self, draft: dict[int, int], passes: bool) -> None:
        logits = self.LOGITS.expand(2, -1)
        for seed in SEEDS:
            each = verification_input(seeded(seed), 3, [1], distributions={1: draft})
            assert accepted(LogitComparison(1e-5), logits, each) == (passes or draws_of(logits, each)[0] == 1)

    def test_eps_is_in_nats(self) -> None:
        seed = next(seed for seed in SEEDS if draws_of(self.LOGITS[None], verification_input(seeded(seed), 3))[0] == 0)
        each = verification_input(seeded(seed), 3, [1], distributions={1: {1: 60, 0: 40}})  # twice as sure
        assert accepted(LogitComparison(math.log(2) + 1e-3), self.LOGITS.expand(2, -1), each) == 1
        assert accepted(LogitComparison(math.log(2) - 1e-3), self.LOGITS.expand(2, -1), each) == 0

    def test_a_token_without_a_distribution_was_certain(self) -> None:
        seed = next(seed for seed in SEEDS if draws_of(self.LOGITS[None], verification_input(seeded(seed), 3))[0] == 0)
        assert accepted(LogitComparison(1e-5), self.LOGITS.expand(2, -1), verification_input(seeded(seed), 3, [1])) == 0

    def test_impossible_tokens_are_never_accepted(self) -> None:
        params = SamplingParams(top_k=1)
        each = verification_input(params, 3, [1], distributions={1: {1: 1, 0: 60000}})
        assert accepted(LogitComparison(50.0), self.LOGITS.expand(2, -1), each) == 0


class TestRelaxedThinking:
    BEGIN, END = 8, 9
    LOGITS = logits_of(0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.005)

    def rule(self, topk: int = 3, delta: float = 0.35) -> RelaxedThinking:
        return RelaxedThinking(self.BEGIN, self.END, topk, delta)

    def accepted_tokens(self, rule: RelaxedThinking, prompt: list[int], *path: int) -> int:
        each = verification_input(GREEDY, 10, path, prompt=prompt)
        return accepted(rule, self.LOGITS.expand(len(each.rows), -1), each)

    @pytest.mark.parametrize(
        ("topk", "delta", "tokens"), [(3, 0.35, {0, 1}), (3, 0.45, {0, 1, 2}), (2, 0.45, {0, 1}), (1, 0.6, {0})]
    )
    def test_topk_and_delta(self, topk: int, delta: float, tokens: set[int]) -> None:
        """Greedy, so that only the largest would stand otherwise: probabilities are those of temperature 1."""
        assert {t for t in range(8) if self.accepted_tokens(self.rule(topk, delta), [1, self.BEGIN], t)} == tokens

    def test_only_in_a_thinking_phase(self) -> None:
        assert self.accepted_tokens(self.rule(), [1, self.BEGIN, 4], 1) == 1
        assert self.accepted_tokens(self.rule(), [1, 4], 1) == 0
        assert self.accepted_tokens(self.rule(), [1, self.BEGIN, 4, self.END], 1) == 0
        assert self.accepted_tokens(self.rule(), [1, self.BEGIN, self.END, self.BEGIN], 1) == 1

    def test_draft_tokens_begin_and_end_phases(self) -> None:
        wide = self.rule(topk=10, delta=1.0)
        assert self.accepted_tokens(wide, [1, self.BEGIN], 1, self.END, 1) == 2
        assert self.accepted_tokens(wide, [1], self.BEGIN, 1) == 0, "not in a thinking phase: the target has to draw it"
        logits = self.LOGITS.roll(self.BEGIN).expand(3, -1)  # now it does
        assert accepted(wide, logits, verification_input(GREEDY, 10, [self.BEGIN, 1], prompt=[1])) == 2

    def test_the_phase_follows_the_request(self) -> None:
        rule, history = self.rule(), History(GREEDY, [1], [], 10)
        for prompt, passes in (([1], 0), ([1, self.BEGIN], 1), ([1, self.BEGIN, 0], 1), ([1, 8, 0, self.END, 2], 0)):
            each = verification_input(GREEDY, 10, [1], prompt=prompt, history=history)
            assert accepted(rule, self.LOGITS.expand(2, -1), each) == passes

    def test_masked_tokens_are_never_accepted(self) -> None:
        barred = SamplingParams(temperature=0, bad_words=((1,),))
        each = verification_input(barred, 10, [1], prompt=[self.BEGIN])
        assert accepted(self.rule(10, 1.0), self.LOGITS.expand(2, -1), each) == 0

    def test_filters_apply(self) -> None:
        for seed in SEEDS:
            each = verification_input(seeded(seed, top_k=1), 10, [1], prompt=[self.BEGIN])
            assert accepted(self.rule(10, 1.0), self.LOGITS.expand(2, -1), each) == 0


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
        logits = torch.tensor([0.0, -50.0]).expand(3, -1)
        rule = SyntheticAcceptance(0.5)
        for seed in SEEDS:
            ones, zeros = (accepted(rule, logits, verification_input(seeded(seed), 2, [t, t])) for t in (1, 0))
            assert ones == zeros

    @pytest.mark.parametrize(("rate", "tokens"), [(1.0, 3), (0.0, 1)])
    def test_always_and_never(self, rate: float, tokens: int) -> None:
        """At 0 even what the target draws is not accepted, and at 1 the first of siblings is."""
        logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]]).expand(4, -1)
        each = verification_input(GREEDY, 4, [1, 2], [3])
        [committed] = SyntheticAcceptance(rate).verify(logits, [each])
        assert committed == ([1, 2, 1] if tokens == 3 else [1])


@pytest.mark.parametrize(
    ("keys", "name", "level"),
    [
        ({}, "coupled", None),
        ({"rejection_sampling_strategy": "residual"}, "residual", logging.INFO),
        ({"rejection_sampling_strategy": "typical-acceptance"}, "typical-acceptance", logging.WARNING),
        ({"rejection_sampling_strategy": "logit-comparison"}, "logit-comparison", logging.WARNING),
        (
            {
                "use_relaxed_acceptance_for_thinking": True,
                "begin_thinking_phase_token": 1,
                "end_thinking_phase_token": 2,
            },
            "relaxed-thinking",
            logging.WARNING,
        ),
        ({"synthetic_acceptance_rate": 0.5}, "synthetic", logging.WARNING),
    ],
)
def test_a_strategy_logs_its_warning(
    keys: dict[str, object], name: str, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = SpeculativeConfig(method="ngram", **keys)
    assert isinstance(make_verifier(speculation), Verifier)
    with caplog.at_level(logging.INFO):
        Engine(TableModel(8, 256, 256), EngineConfig(slots=256), speculation, NoDraftClient(), FREE)
    logged = [(record.levelno, record.message) for record in caplog.records if name in record.message]
    assert [lvl for lvl, _ in logged] == ([level] if level else [])
    assert all(("lossy" in message) == (level == logging.WARNING) for _, message in logged)
