"""Strategies in the real engine with real drafts: `residual` is exact in distribution; false drafts break nothing."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth, GrowthBatch
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.best_first import BestFirst, BestFirstRequest, ModelNetwork
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftingLimits
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest
from paceline.model.model import Model
from paceline.model.rows import SlotTable
from paceline_lab.fake_models.table_model import TableModel
from tests.exactness.test_draw_distribution import SIGNIFICANCE, chi_square_tail
from tests.exactness.test_engine import FREE, Liar, llama
from tests.exactness.test_sampling import reference_distribution
from tests.helpers.drafts import model_draft, ngram_draft
from tests.helpers.engine_runs import run

SIZE = 16
LENGTH = 3
TABLE = TableModel(SIZE, 1024, 1024)


def logits_after(model: Model, tokens: Sequence[int]) -> list[float]:
    slot_table = SlotTable(range(1, len(tokens) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, [len(rows) - 1]).logits[0].float().tolist()  # type: ignore[no-any-return]


def favourites(begin: Sequence[int], count: int) -> list[int]:
    tokens = list(begin)
    for _ in range(count):
        logits = logits_after(TABLE, tokens)
        tokens.append(logits.index(max(logits)))
    return tokens[len(begin) :]


PROMPT = [1, 2, 3, *favourites([1, 2, 3], 4), 1, 2, 3]
"""Its end occurs earlier, followed by the target's most probable tokens: n-grams find a match."""


def draft_model(
    disagreement: float = 0.5, kind: type[NetworkSpeculator[BestFirstRequest]] = NetworkSpeculator
) -> DraftClient:
    network = ModelNetwork(TableModel(SIZE, 1024, 1024, disagreement))
    return LocalDraftClient(kind(BestFirst(network, DraftingLimits())))


def engine(drafting: DraftClient, lookups: Sequence[DraftClient] = (), model: Model = TABLE, **keys: object) -> Engine:
    speculation = SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": 4, **keys})
    return Engine(model, EngineConfig(slots=model.slots), speculation, drafting, FREE, lookup_clients=lookups)


def generation_requests(count: int, length: int = LENGTH, **settings: object) -> list[GenerationRequest]:
    """Requests that differ in their seeds."""
    params = [SamplingParams(seed=seed, max_tokens=length, **settings) for seed in range(count)]
    report = SpeculativeOptions(report=True)
    return [GenerationRequest(str(seed), PROMPT, each, report) for seed, each in enumerate(params)]


def tokens_of(results: Mapping[str, Delta]) -> list[list[int]]:
    return [result.tokens for result in results.values()]


def distribution_after(model: Model, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the chain rule. Paths that next to never come are left out."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*path, token): weight * p
            for path, weight in distribution.items()
            for token, p in enumerate(reference_distribution(logits_after(model, [*PROMPT, *path]), params))
            if weight * p > 1e-5
        }
    return distribution


def tail(results: Sequence[Sequence[int]], distribution: dict[tuple[int, ...], float]) -> float:
    """The chi-square tail; outcomes missing from the distribution count as one."""
    counts = Counter(map(tuple, results))
    known = [counts.pop(path, 0) for path in distribution]
    return chi_square_tail(
        [*known, sum(counts.values())], [*distribution.values(), max(0.0, 1 - sum(distribution.values()))]
    )


RESIDUAL: dict[str, object] = {"rejection_sampling_strategy": "residual"}
BLOCK = {**RESIDUAL, "block_verification": True}
RULES = {"one by one": RESIDUAL, "as a block": BLOCK}
FILTERED: dict[str, object] = {"temperature": 0.7, "top_k": 2}
QUICK = (("draft_model", "one by one", {}), ("both", "as a block", FILTERED))


@pytest.mark.parametrize(
    ("method", "rule", "settings"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(("draft_model", "ngram", "both"), RULES, ({}, FILTERED))
    ],
)
def test_residual_has_the_targets_distribution(method: str, rule: str, settings: dict[str, object]) -> None:
    ngram = LocalDraftClient(ngram_draft(1, 3, 1))
    drafting, lookups = ngram if method == "ngram" else draft_model(), [ngram] if method == "both" else []
    results = run(engine(drafting, lookups, **RULES[rule]), generation_requests(800, **settings), together=40)
    distribution = distribution_after(TABLE, SamplingParams(**settings), LENGTH)
    assert tail(tokens_of(results), distribution) > SIGNIFICANCE
    assert sum(sum(result.accepted) for result in results.values()) > 100


@pytest.mark.slow
def test_residual_has_a_transformers_distribution() -> None:
    draft = LocalDraftClient(model_draft(llama(torch.float32, noise=0.02), 1))
    results = run(engine(draft, model=llama(torch.float32), **RESIDUAL), generation_requests(400, 2), together=50)
    distribution = distribution_after(llama(torch.float32), SamplingParams(), 2)
    assert tail(tokens_of(results), distribution) > SIGNIFICANCE


class FalseDistributions(NetworkSpeculator[BestFirstRequest]):
    """Sends other distributions than those that it samples from."""

    def grow(self) -> dict[int, Growth]:
        return {
            key: replace(growth, distributions=[{token: 1, (token + 1) % SIZE: 3} for token in growth.tokens])
            for key, growth in super().grow().items()
        }


def test_a_false_draft_distribution_is_detected() -> None:
    """The tests above can fail."""
    results = run(engine(draft_model(kind=FalseDistributions), **RESIDUAL), generation_requests(800), together=40)
    assert tail(tokens_of(results), distribution_after(TABLE, SamplingParams(), LENGTH)) < SIGNIFICANCE


def test_the_same_drafting_gives_the_same_tokens() -> None:
    """Noise is keyed, so a run can be repeated."""
    steady = {**RESIDUAL, "draft_schedule": "lockstep", "row_budget": False}  # drafting does not depend on the clock
    first, second = (tokens_of(run(engine(draft_model(), **steady), generation_requests(10, 40))) for _ in range(2))
    assert first == second


class LyingDistributions(Liar):
    """Sends random distributions, and branches instead of chains."""

    def grow(self) -> dict[int, Growth]:
        rng = random.Random(3)
        return {key: self._lie(growth, rng) for key, growth in super().grow().items()}

    def _lie(self, growth: Growth, rng: random.Random) -> Growth:
        tokens = [token % SIZE for token in growth.tokens]
        distributions = [
            {rng.randrange(SIZE + 1): rng.choice([1, 10**9]) for _ in range(rng.randrange(4))} | {token: 1}
            if rng.random() < 0.8
            else {}
            for token in tokens
        ]
        return replace(growth, tokens=tokens, distributions=distributions)


STRATEGIES: dict[str, tuple[dict[str, object], tuple[str, bool, bool], str]] = {
    "coupled": ({}, ("coupled", False, True), ""),
    "greedy": ({"rejection_sampling_strategy": "greedy"}, ("greedy", True, True), "lossy"),
    "residual": (RESIDUAL, ("residual", False, False), "not drafter-invariant"),
    "as a block": (BLOCK, ("residual", False, False), "not drafter-invariant"),
    "typical": (
        {"rejection_sampling_strategy": "typical-acceptance"},
        ("typical-acceptance", True, False),
        "lossy",
    ),
    "logits": ({"rejection_sampling_strategy": "logit-comparison"}, ("logit-comparison", True, False), "lossy"),
    "relaxed": (
        {
            "use_relaxed_acceptance_for_thinking": True,
            "begin_thinking_phase_token": 1,
            "end_thinking_phase_token": 2,
        },
        ("relaxed-thinking", True, False),
        "lossy",
    ),
    "synthetic": ({"synthetic_acceptance_rate": 0.5}, ("synthetic", True, False), "lossy"),
    "synthetic, never": ({"synthetic_acceptance_rate": 0.0}, ("synthetic", True, False), "lossy"),
}
"""Configuration; name, lossy and drafter-invariant as statistics tell them; what the log warns of."""


@pytest.mark.parametrize(("keys", "promises", "warning"), STRATEGIES.values(), ids=STRATEGIES)
def test_log_and_statistics_tell_what_a_strategy_costs(
    keys: dict[str, object], promises: tuple[str, bool, bool], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        target = engine(draft_model(0.0), **keys)
    level = logging.WARNING if warning == "lossy" else logging.INFO
    logged = [(record.levelno, record.message) for record in caplog.records if promises[0] in record.message]
    assert [number for number, _ in logged] == ([level] if warning else [])
    assert all(warning in message for _, message in logged)
    target.submit(generation_requests(1)[0])
    [stats] = [delta.speculation for _ in range(20) for delta in target.step() if delta.finish_reason]
    assert stats is not None
    assert (stats.strategy, stats.lossy, stats.drafter_invariant) == promises


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["coupled", "greedy", "residual", "as a block", "typical", "logits", "synthetic"])
def test_a_lying_draft_breaks_nothing(name: str, temperature: float) -> None:
    """Greedy requests stay exact, where the strategy is exact for them, and all, where it is drafter-invariant."""
    keys, (_, _, drafter_invariant), _ = STRATEGIES[name]
    requests = generation_requests(6, 50, temperature=temperature)
    ours = tokens_of(run(engine(LocalDraftClient(LyingDistributions()), **keys), requests))
    assert [len(tokens) for tokens in ours] == [50] * 6
    if drafter_invariant or (temperature == 0 and name not in ("typical", "synthetic")):
        alone = generation_requests(6, 50, temperature=0.0 if name == "greedy" else temperature)
        assert ours == tokens_of(run(engine(NoDraftClient()), alone))


@pytest.mark.parametrize("rule", RULES)
def test_residual_at_temperature_0_is_greedy_decoding(rule: str) -> None:
    requests = generation_requests(2, 60, temperature=0.0)
    plain = tokens_of(run(engine(NoDraftClient()), requests))
    assert tokens_of(run(engine(draft_model(0.3), **RULES[rule]), requests)) == plain


def test_synthetic_acceptance_rate() -> None:
    """The mean of the joint rates over depths is the one that was asked for."""
    steady = {"num_speculative_tokens": 3, "row_budget": False, "draft_schedule": "lockstep"}
    draft = model_draft(TableModel(SIZE, 1024, 1024, 0.9), 3, least_path_probability=0.0)
    target = engine(LocalDraftClient(draft), synthetic_acceptance_rate=0.6, **steady)
    ends = [each.speculation for each in run(target, generation_requests(30, 80)).values() if each.speculation]
    drafted, accepted = (
        [sum(each[depth] for each in counts) for depth in range(3)]
        for counts in ([each.drafted_by_depth for each in ends], [each.accepted_by_depth for each in ends])
    )
    assert min(drafted) > 300
    assert sum(a / d for a, d in zip(accepted, drafted, strict=True)) / 3 == pytest.approx(0.6, abs=0.06)


def test_the_first_guess_at_a_place_of_a_chain_stays_the_only_one() -> None:
    tree = TokenTree(0, 0, chain=True)
    assert tree.graft(Growth(0, 1, [0, 0, 2], [5, 6, 7], [-0.1] * 3, [{5: 1, 6: 2}, {6: 1}, {7: 1}]), 10) == 1
    assert tree.graft(Growth(0, 1, [0, 1], [5, 8], [-0.1] * 2, [{5: 7}, {8: 1}]), 10, source=1) == 1
    assert (tree.tokens, tree.parents) == ([0, 5, 8], [-1, ROOT, 1])
    assert tree.distributions == {1: {5: 1, 6: 2}, 2: {8: 1}}


def test_growth_keeps_distributions_with_their_nodes() -> None:
    tree = TokenTree(0, 0)
    first = tree.add(ROOT, 5, -0.1, {5: 2})
    [(_, growth)] = GrowthBatch.of([(1, tree.growth([first])), (1, tree.growth([tree.add(first, 6, -0.1)]))])
    assert growth.distributions == [{5: 2}, {}]
    assert tree.growth([tree.add(first, 7, -0.1)]).distributions == ()


@pytest.mark.parametrize("distribution", [{6: 1}, {5: 0}, {5: 1, 6: -1}])
def test_a_distribution_without_the_token_is_rejected(distribution: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot have been drawn"):
        Growth(0, 1, [0], [5], [-0.1], [distribution]).check()
