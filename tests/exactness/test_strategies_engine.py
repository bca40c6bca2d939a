"""Strategies in the real engine with real drafts: `residual` is exact in distribution; false drafts break nothing."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth, GrowthBatch
from paceline.core.messages import GenerationRequest
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.methods.ngram import NGramSpeculator
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.model.model import Model
from paceline.model.rows import SlotTable
from paceline_lab.fake_models.table_model import TableModel
from tests.exactness.test_draw_distribution import SIGNIFICANCE, chi_square_tail
from tests.exactness.test_engine import FREE, Liar, llama, run
from tests.exactness.test_sampling import reference_distribution

SIZE = 16
LENGTH = 3


def _favourites(begin: Sequence[int], count: int) -> list[int]:
    tokens = list(begin)
    for _ in range(count):
        logits = _logits(TableModel(SIZE, 64, 64), tokens)
        tokens.append(logits.index(max(logits)))
    return tokens[len(begin) :]


def _logits(model: Model, tokens: Sequence[int]) -> list[float]:
    slot_table = SlotTable()
    slot_table.slots.extend(range(1, len(tokens) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, [len(rows) - 1]).logits[0].float().tolist()  # type: ignore[no-any-return]


PROMPT = [1, 2, 3, *_favourites([1, 2, 3], 4), 1, 2, 3]
"""Its end occurs earlier, followed by the target's most probable tokens: n-grams find a match."""


def table(disagreement: float = 0.0) -> TableModel:
    return TableModel(SIZE, 1024, 1024, disagreement)


def engine(model: Model, drafting: DraftClient, keys: dict[str, object], lookups: Sequence[DraftClient] = ()) -> Engine:
    speculation = SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": 4, **keys})
    return Engine(model, EngineConfig(slots=model.slots), speculation, drafting, FREE, lookups=lookups)


def submissions(count: int, length: int = LENGTH, **settings: float) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(seed),
            PROMPT,
            SamplingParams(seed=seed, max_tokens=length, **settings),
            SpeculativeOptions(report=True),
        )
        for seed in range(count)
    ]


def distribution_after(model: Model, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the chain rule. Paths that next to never come are left out."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*path, token): weight * p
            for path, weight in distribution.items()
            for token, p in enumerate(reference_distribution(_logits(model, [*PROMPT, *path]), params))
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


RESIDUAL = {"rejection_sampling_strategy": "residual"}
BLOCK = {**RESIDUAL, "block_verification": True}


FILTERED = {"temperature": 0.7, "top_k": 2}
METHODS = [
    pytest.param(
        *case,
        marks=[] if case in (("draft_model", RESIDUAL, {}), ("both", BLOCK, FILTERED)) else pytest.mark.slow,
        id=f"{case[0]} {'as a block' if case[1] is BLOCK else 'one by one'} {'filtered' if case[2] else 'plain'}",
    )
    for case in itertools.product(("draft_model", "ngram", "both"), (RESIDUAL, BLOCK), ({}, FILTERED))
]


@pytest.mark.parametrize(("method", "keys", "settings"), METHODS)
def test_residual_has_the_targets_distribution(
    method: str, keys: dict[str, object], settings: dict[str, float]
) -> None:
    drafts = {
        "draft_model": DraftModelSpeculator(table(0.5), 1),
        "ngram": NGramSpeculator(1, 3, 1),
        "both": DraftModelSpeculator(table(0.5), 1),
    }
    lookups = [LocalDraftClient(NGramSpeculator(1, 3, 1))] if method == "both" else []
    target = engine(table(), LocalDraftClient(drafts[method]), keys, lookups)
    results = run(target, submissions(800, **settings), together=40)
    distribution = distribution_after(table(), SamplingParams(**settings), LENGTH)
    assert tail([result.tokens for result in results.values()], distribution) > SIGNIFICANCE
    accepted = sum(sum(result.accepted) for result in results.values())
    assert accepted > 100


@pytest.mark.slow
def test_residual_has_a_transformers_distribution() -> None:
    target = engine(
        llama(torch.float32), LocalDraftClient(DraftModelSpeculator(llama(torch.float32, noise=0.02), 1)), RESIDUAL
    )
    results = run(target, submissions(400, 2), together=50)
    distribution = distribution_after(llama(torch.float32), SamplingParams(), 2)
    assert tail([result.tokens for result in results.values()], distribution) > SIGNIFICANCE


def test_a_false_draft_distribution_is_detected() -> None:
    """The tests above can fail."""

    class FalseDistributions(DraftModelSpeculator):
        def grow(self) -> dict[int, Growth]:
            return {
                key: Growth(
                    g.base_position,
                    g.first_id,
                    g.parent_ids,
                    g.tokens,
                    g.log_probs,
                    [{token: 1, (token + 1) % SIZE: 3} for token in g.tokens],
                )
                for key, g in super().grow().items()
            }

    target = engine(table(), LocalDraftClient(FalseDistributions(table(0.5), 1)), RESIDUAL)
    results = run(target, submissions(800), together=40)
    assert (
        tail([a.tokens for a in results.values()], distribution_after(table(), SamplingParams(), LENGTH)) < SIGNIFICANCE
    )


@pytest.mark.parametrize("keys", [RESIDUAL, BLOCK], ids=["one by one", "as a block"])
def test_residual_at_temperature_0_is_greedy_decoding(keys: dict[str, object]) -> None:
    plain = run(engine(table(), NoDraftClient(), {}), submissions(2, 60, temperature=0.0))
    ours = run(
        engine(table(), LocalDraftClient(DraftModelSpeculator(table(0.3), 1)), keys),
        submissions(2, 60, temperature=0.0),
    )
    assert [a.tokens for a in ours.values()] == [a.tokens for a in plain.values()]


def test_the_same_drafting_gives_the_same_tokens() -> None:
    """Noise is keyed, so a run can be repeated."""
    steady = {**RESIDUAL, "draft_schedule": "lockstep", "row_budget": False}  # drafting does not depend on the clock
    first, second = (
        run(engine(table(), LocalDraftClient(DraftModelSpeculator(table(0.5), 1)), steady), submissions(10, 40))
        for _ in range(2)
    )
    assert [a.tokens for a in first.values()] == [a.tokens for a in second.values()]


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
        return Growth(growth.base_position, growth.first_id, growth.parent_ids, tokens, growth.log_probs, distributions)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "keys",
    [
        RESIDUAL,
        BLOCK,
        {"rejection_sampling_strategy": "typical-acceptance"},
        {"rejection_sampling_strategy": "logit-comparison"},
        {"synthetic_acceptance_rate": 0.5},
    ],
    ids=str,
)
def test_a_lying_draft_breaks_nothing(keys: dict[str, object], temperature: float) -> None:
    requests = submissions(6, 50, temperature=temperature)
    results = run(engine(table(), LocalDraftClient(LyingDistributions()), keys), requests)
    assert all(len(result.tokens) == 50 for result in results.values())


@pytest.mark.parametrize("keys", [RESIDUAL, BLOCK, {"rejection_sampling_strategy": "logit-comparison"}], ids=str)
def test_greedy_requests_are_exact_with_false_distributions(keys: dict[str, object]) -> None:
    plain = run(engine(table(), NoDraftClient(), {}), submissions(3, 40, temperature=0.0))
    ours = run(engine(table(), LocalDraftClient(LyingDistributions()), keys), submissions(3, 40, temperature=0.0))
    assert [a.tokens for a in ours.values()] == [a.tokens for a in plain.values()]


def test_synthetic_acceptance_rate() -> None:
    target = engine(
        table(),
        LocalDraftClient(DraftModelSpeculator(table(0.9), 3, least_path_probability=0.0)),
        {
            "synthetic_acceptance_rate": 0.6,
            "num_speculative_tokens": 3,
            "row_budget": False,
            "draft_schedule": "lockstep",
        },
    )
    drafted, accepted = [0] * 3, [0] * 3
    for submission in submissions(30, 80):
        target.submit(submission)
    while target.busy:
        for delta in target.step():
            if delta.finish_reason and delta.speculation:
                for depth in range(3):
                    drafted[depth] += delta.speculation.drafted_by_depth[depth]
                    accepted[depth] += delta.speculation.accepted_by_depth[depth]
    assert min(drafted) > 300
    joint = [a / d for a, d in zip(accepted, drafted, strict=True)]
    assert sum(joint) / 3 == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("coupled", False, True)),
        ({"rejection_sampling_strategy": "greedy"}, ("greedy", True, True)),
        (RESIDUAL, ("residual", False, False)),
        ({"rejection_sampling_strategy": "typical-acceptance"}, ("typical-acceptance", True, False)),
        ({"synthetic_acceptance_rate": 0.5}, ("synthetic", True, False)),
    ],
    ids=str,
)
def test_statistics_name_the_strategy(keys: dict[str, object], expected: tuple[str, bool, bool]) -> None:
    target = engine(table(), LocalDraftClient(DraftModelSpeculator(table(), 1)), keys)
    target.submit(submissions(1)[0])
    last = [delta for _ in range(20) for delta in target.step() if delta.finish_reason]
    stats = last[0].speculation
    assert stats is not None
    assert (stats.strategy, stats.lossy, stats.drafter_invariant) == expected


class TestChain:
    """A tree that is a chain: the first guess at a place stays the only one."""

    def test_a_second_child_is_dropped_and_its_descendants(self) -> None:
        tree = TokenTree(0, 0, chain=True)
        assert tree.graft(Growth(0, 1, [0, 0, 2], [5, 6, 7], [-0.1] * 3), 10) == 1
        assert tree.tokens == [0, 5]

    def test_a_second_drafts_node_keeps_the_first_distribution(self) -> None:
        tree = TokenTree(0, 0, chain=True)
        tree.graft(Growth(0, 1, [0], [5], [-0.1], [{5: 1, 6: 2}]), 10)
        assert tree.graft(Growth(0, 1, [0, 1], [5, 8], [-0.1] * 2, [{5: 7}, {8: 1}]), 10, source=1) == 1
        assert tree.distributions[1] == {5: 1, 6: 2}
        assert (tree.tokens, tree.parents) == ([0, 5, 8], [-1, ROOT, 1])

    def test_growth_keeps_distributions_with_their_nodes(self) -> None:
        tree = TokenTree(0, 0)
        first = tree.add(ROOT, 5, -0.1, {5: 2})
        both = [(1, tree.growth([first])), (1, tree.growth([tree.add(first, 6, -0.1)]))]
        [(_, growth)] = GrowthBatch.of(both)
        assert growth.distributions == [{5: 2}, {}]
        assert (tree.growth([tree.add(first, 7, -0.1)])).distributions == ()

    @pytest.mark.parametrize("distribution", [{6: 1}, {5: 0}, {5: 1, 6: -1}])
    def test_a_distribution_without_the_token_is_rejected(self, distribution: dict[int, int]) -> None:
        with pytest.raises(ValueError, match="cannot have been drawn"):
            Growth(0, 1, [0], [5], [-0.1], [distribution]).check()
