"""The same tokens with speculation on and off, for any draft, batch, preemption and resumption."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.policy.step_cost import RowCost
from paceline.core.tree import TokenTree
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.engine.engine import Engine
from paceline.messages import Delta, FinishReason, GenerationRequest
from paceline.model.loading import build
from paceline.model.model import Model
from paceline.telemetry.step_stats import StepStats
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import model_draft, ngram_draft, suffix_draft
from tests.helpers.engine_runs import run
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.parallel import drafting_for
from tests.helpers.replicas import Replicas

FREE = RowCost([8, 256], [1.0, 1.001])
"""Rows that cost nothing: every guess is verified."""


def llama(dtype: torch.dtype, noise: float = 0.0, slots: int = 2048) -> Model:
    return build(peaked_llama(noise).to(dtype), "llama", EngineConfig(slots=slots), "", [])


class Liar(Replicas):
    """Sends random tokens with high probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(1)

    def guesses(self, request_id: int, tree: TokenTree) -> Iterator[int]:
        parents = range(tree.size + 1)
        for parent in self._random.sample(parents, min(3, len(parents))):
            token = self._random.randrange(VOCABULARY)
            if tree.child(parent, token) is None and tree.size < 40:
                yield tree.add(parent, token, -0.01)


def drafting(method: str, dtype: torch.dtype, width: int) -> DraftClient:
    speculators = {
        "draft_model": lambda: model_draft(llama(dtype, noise=0.02), width),
        "perfect": lambda: model_draft(llama(dtype), width),
        "ngram": lambda: ngram_draft(1, 4, width),
        "suffix": lambda: suffix_draft(SpeculativeConfig(method="suffix", tree_width=width)),
        "liar": Liar,
    }
    return LocalDraftClient(speculators[method]())


def engine(
    model: Model,
    source: DraftClient,
    *,
    lookups: Sequence[DraftClient] = (),
    depth: int = 4,
    nodes: int = 16,
    **settings: int,
) -> Engine:
    config = EngineConfig(slots=max(model.slots, 256), **settings)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=depth, max_tree_nodes=nodes)
    return Engine(model, config, speculation, source, FREE, lookup_clients=lookups)


def generation_requests() -> list[GenerationRequest]:
    rng = random.Random(4)
    loop = rng.choices(range(VOCABULARY), k=5) * 30  # something for n-grams to find
    prompts = [rng.choices(range(VOCABULARY), k=n) for n in (1, 3, 63, 64, 65, 130)] + [loop, loop[:77]]
    return [
        GenerationRequest(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(zip(prompts, LAWS, strict=True))
    ]


def same(ours: dict[str, Delta], plain: dict[str, Delta]) -> bool:
    """Tokens, log-probabilities, reason; all but how many prompt tokens the cache knew."""
    return {k: (a.tokens, a.log_probs, a.finish_reason) for k, a in ours.items()} == {
        k: (a.tokens, a.log_probs, a.finish_reason) for k, a in plain.items()
    }


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(dtype: torch.dtype) -> dict[str, Delta]:
    """One request at a time, no speculation: what everything else is compared with."""
    results = run(engine(llama(dtype), NoDraftClient()), generation_requests(), together=1)
    assert len({tuple(result.tokens[:8]) for result in results.values()}) == len(results)
    return results


def accepted(target: Engine, source: int) -> float:
    """Guesses of this source that the target drew."""
    return sum(sum(target.calibrations[source, greedy].accepted) for greedy in (True, False))


@pytest.mark.parametrize("method", ["draft_model", "liar"])
@pytest.mark.parametrize("lookups", [("ngram",), ("suffix", "ngram")])
def test_several_drafts_of_one_tree_change_no_token(
    plain: dict[str, Delta], dtype: torch.dtype, method: str, lookups: Sequence[str]
) -> None:
    others = [drafting(name, dtype, 2) for name in lookups]
    target = engine(llama(dtype), drafting(method, dtype, 3), lookups=others, depth=6, nodes=24)
    assert same(run(target, generation_requests()), plain)
    sources = range(OWN_DRAFT_SOURCE + 1, OWN_DRAFT_SOURCE + 1 + len(lookups))
    assert all(sum(target.calibrations[source, True].drafted) > 0 for source in sources), "each finds something first"
    assert sum(accepted(target, source) for source in sources) > 0, "what the other one does not find"
    assert method == "liar" or accepted(target, OWN_DRAFT_SOURCE) > 5, "and what the other one guesses"


def test_each_draft_has_its_own_calibration(dtype: torch.dtype) -> None:
    """The acceptance rates of a bad and a good draft are learned apart."""
    others = [drafting(name, dtype, 2) for name in ("liar", "perfect")]
    target = engine(llama(dtype), drafting("ngram", dtype, 2), lookups=others, depth=6, nodes=24)
    run(target, generation_requests())

    def share(source: int) -> float:
        return accepted(target, source) / sum(sum(target.calibrations[source, g].drafted) for g in (True, False))

    assert share(OWN_DRAFT_SOURCE + 1) < 0.1
    assert share(OWN_DRAFT_SOURCE + 2) > 0.4


def test_a_repeated_request_is_drafted_from_its_first_output(plain: dict[str, Delta], dtype: torch.dtype) -> None:
    others = [drafting(name, dtype, 2) for name in ("ngram", "suffix")]
    target = engine(llama(dtype), NoDraftClient(), lookups=others, depth=6, nodes=24)
    run(target, generation_requests())
    first = accepted(target, OWN_DRAFT_SOURCE + 2)
    assert same(run(target, generation_requests()), plain)
    assert accepted(target, OWN_DRAFT_SOURCE + 2) > 2 * first + 20


@pytest.mark.parametrize("method", ["draft_model", "perfect", "ngram", "suffix", "liar"])
@pytest.mark.parametrize(("depth", "nodes", "width"), [(1, 1, 1), (3, 3, 1), (4, 16, 3), (8, 40, 4)])
def test_speculation_changes_no_token(
    plain: dict[str, Delta], dtype: torch.dtype, method: str, depth: int, nodes: int, width: int
) -> None:
    source = drafting(method, dtype, width)
    assert same(run(engine(llama(dtype), source, depth=depth, nodes=nodes), generation_requests()), plain)


@pytest.mark.parametrize("method", ["pard", "dflash", "dspark", "peagle"])
def test_guesses_of_one_pass_change_no_token(
    plain: dict[str, Delta], dtype: torch.dtype, method: str, tmp_path: Path
) -> None:
    """Prompts come in chunks; and twice, so that prefixes come from the cache."""
    source = LocalDraftClient(drafting_for(llama(dtype), method, tmp_path))
    target = engine(llama(dtype), source, nodes=24, max_num_batched_rows=17)
    steps: list[StepStats] = []
    for _ in range(2):
        assert same(run(target, generation_requests(), steps=steps), plain)
    assert sum(step.speculation.accepted_tokens for step in steps) > (300 if method == "pard" else 20)


@pytest.mark.parametrize("method", ["draft_model", "dflash", "dspark", "peagle"])
def test_preemption_changes_no_token(plain: dict[str, Delta], dtype: torch.dtype, method: str, tmp_path: Path) -> None:
    steps: list[StepStats] = []
    in_one_pass = LocalDraftClient(drafting_for(llama(dtype), method, tmp_path)) if method != "draft_model" else None
    target = engine(llama(dtype, slots=256), in_one_pass or drafting(method, dtype, 2), nodes=8)
    assert same(run(target, generation_requests(), steps=steps), plain)
    assert sum(step.preemptions for step in steps) > 3


@pytest.mark.parametrize("rows", [8, 17, 64])
def test_chunked_prefill_changes_no_token(plain: dict[str, Delta], dtype: torch.dtype, rows: int) -> None:
    source = drafting("perfect", dtype, 2)
    assert same(run(engine(llama(dtype), source, max_num_batched_rows=rows), generation_requests()), plain)


def test_other_requests_and_the_prefix_cache_change_no_token(plain: dict[str, Delta], dtype: torch.dtype) -> None:
    target = engine(llama(dtype), NoDraftClient())
    assert same(run(target, generation_requests(), together=5), plain)
    again = run(target, generation_requests(), together=3)
    assert same(again, plain)
    assert sum(a.usage.cached_tokens for a in again.values() if a.usage) > 300


@pytest.mark.parametrize("split", [1, 7, 33])
def test_resuming_elsewhere_changes_no_token(plain: dict[str, Delta], dtype: torch.dtype, split: int) -> None:
    resumed = [
        replace(each, committed=plain[each.request_id].tokens[:split])
        for each in generation_requests()
        if len(plain[each.request_id].tokens) > split
    ]
    results = run(engine(llama(dtype), drafting("perfect", dtype, 2)), resumed)
    for s in resumed:
        assert [*s.committed, *results[s.request_id].tokens] == plain[s.request_id].tokens


def test_good_drafts_are_accepted(dtype: torch.dtype) -> None:
    requests = [replace(each, speculative=SpeculativeOptions(report=True)) for each in generation_requests()]
    target = engine(llama(dtype), drafting("perfect", dtype, 2), depth=6, nodes=12)
    for key, result in run(target, requests).items():
        assert result.speculation is not None
        assert result.speculation.acceptance_length > 0.8, key
        assert result.speculation.drafts == ["local"]


def test_a_request_may_lower_the_limits(plain: dict[str, Delta], dtype: torch.dtype) -> None:
    target = engine(llama(dtype), drafting("perfect", dtype, 2))
    options = (SpeculativeOptions(enabled=False), SpeculativeOptions(num_speculative_tokens=1), SpeculativeOptions())
    requests = [replace(each, speculative=options[i % 3]) for i, each in enumerate(generation_requests())]
    assert same(run(target, requests), plain)


def test_usage_and_reason_agree_with_the_tokens(plain: dict[str, Delta]) -> None:
    for request in generation_requests():
        result = plain[request.request_id]
        assert result.usage is not None
        assert result.usage.completion_tokens == len(result.tokens)
        assert result.usage.prompt_tokens == len(request.prompt)
        stops = request.sampling.stop_token_ids
        assert not any(t in stops for t in result.tokens[:-1])
        if result.finish_reason is FinishReason.STOP:
            assert result.tokens[-1] in stops
            assert len(result.tokens) >= request.sampling.min_tokens
        else:
            assert result.finish_reason is FinishReason.LENGTH
            assert len(result.tokens) == request.sampling.max_tokens


def test_cancelling_frees_everything() -> None:
    model = TableModel(VOCABULARY, 512, 512)
    target = engine(model, LocalDraftClient(model_draft(TableModel(VOCABULARY, 512, 512), 2)))
    for request in generation_requests():
        target.submit(request)
    for victim in generation_requests():
        target.step()
        target.cancel(victim.request_id)
        target.check_integrity()
    [last] = target.step()
    assert last.finish_reason is FinishReason.CANCELLED
    assert not target.busy
    assert target.load.free_slots == 512


@pytest.mark.parametrize(
    ("generation_request", "message"),
    [
        (GenerationRequest("a", [], LAWS[0]), "empty"),
        (GenerationRequest("b", [VOCABULARY], LAWS[0]), "vocabulary"),
        (GenerationRequest("c", [1] * 600, LAWS[0]), "600"),
        (GenerationRequest("d", [1], SamplingParams(max_tokens=2), committed=[1, 2]), "over already"),
        (GenerationRequest("e", [1], SamplingParams(stop_token_ids=(2,)), committed=[1, 2]), "over already"),
        (
            GenerationRequest("f", [1] * 500, SamplingParams(max_tokens=99), committed=[1] * 12),
            "room for 512, and none",
        ),
        (
            GenerationRequest("g", [1] * 500, SamplingParams(max_tokens=99), committed=[1] * 30),
            "room for 512, and none",
        ),
    ],
)
def test_an_invalid_request_ends_alone(generation_request: GenerationRequest, message: str) -> None:
    target = engine(TableModel(VOCABULARY, 512, 512), NoDraftClient())
    good = GenerationRequest("good", [1, 2], SamplingParams(max_tokens=3))
    results = run(target, [good, generation_request])
    assert results[generation_request.request_id].finish_reason is FinishReason.ERROR
    assert message in results[generation_request.request_id].error
    assert len(results["good"].tokens) == 3
