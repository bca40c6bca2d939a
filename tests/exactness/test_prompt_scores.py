"""Log-probabilities of prompts: those of one row at a time, for any chunks, cache, preemption and draft.

And asking for them changes no bit of what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import SamplingParams
from paceline.engine import model_pass, scheduler
from paceline.engine.draft_client import NoDraftClient
from paceline.engine.log_probabilities import log_probs
from paceline.llm import LLM
from paceline.messages import Delta, GenerationRequest, LogProbs
from paceline.model.model import Model
from paceline.model.rows import SlotTable
from paceline.model_names import resolve_model
from paceline.telemetry.step_stats import StepStats
from tests.exactness.test_engine import drafting, engine, generation_requests, llama
from tests.helpers.engine_runs import run
from tests.helpers.llamas import peaked_llama

TOP = 3
Scores = dict[int, LogProbs]


def asking(*, every: int = 1, max_tokens: int | None = None) -> list[GenerationRequest]:
    """The requests of `test_engine`; of each `every` one, the prompt is to be scored."""
    requests = []
    for number, request in enumerate(generation_requests()):
        changed = {"prompt_logprobs": None if number % every else TOP}
        changed |= {} if max_tokens is None else {"max_tokens": max_tokens, "min_tokens": 0}
        requests.append(replace(request, sampling=request.sampling.model_copy(update=changed)))
    return requests


def scores(result: Delta) -> Scores:
    """By position; each has to come once."""
    found: Scores = {}
    for part in result.prompt_log_probs:
        assert part.start == len(found) + 1
        found |= zip(count(part.start), part.entries, strict=False)
    return found


def drawn(results: dict[str, Delta]) -> dict[str, object]:
    return {name: (each.tokens, each.log_probs, each.finish_reason) for name, each in results.items()}


def row_by_row(model: Model, request: GenerationRequest) -> Scores:
    """Every row in a pass of its own."""
    table = SlotTable(range(1, len(request.prompt) + 1))
    rows = [table.row(token, at) for at, token in enumerate(request.prompt)]
    logits = [model.run([row], [0]).logits for row in rows]
    return {at: log_probs(logits[at - 1], [request.prompt[at]], TOP)[0] for at in range(1, len(rows))}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(dtype: torch.dtype) -> dict[str, Scores]:
    model = llama(dtype)
    return {request.request_id: row_by_row(model, request) for request in generation_requests()}


@pytest.fixture(scope="module")
def plain(dtype: torch.dtype) -> dict[str, object]:
    """What is drawn by requests that ask for no scores, one at a time."""
    return drawn(run(engine(llama(dtype), NoDraftClient()), generation_requests(), together=1))


def check(results: dict[str, Delta], requests: Sequence[GenerationRequest], expected: dict[str, Scores]) -> None:
    for request in requests:
        asked = request.sampling.prompt_logprobs is not None
        assert scores(results[request.request_id]) == (expected[request.request_id] if asked else {})


def test_scores_are_those_of_transformers(expected: dict[str, Scores], dtype: torch.dtype) -> None:
    network = peaked_llama().to(dtype)
    for request in generation_requests():
        logits = network(torch.tensor([request.prompt])).logits[0].detach().double()
        theirs = logits.log_softmax(-1)
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        for at, score in expected[request.request_id].items():
            row, token = theirs[at - 1], request.prompt[at]
            assert score.log_prob == pytest.approx(row[token].item(), abs=tolerance)
            assert [value for _, value in score.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=tolerance)


def test_the_shipped_model_s_scores_are_those_of_transformers() -> None:
    llm = LLM("pydoc", None, {"dtype": "float32", "slots": 1024})
    prompt = llm.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[:400]
    [completion] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    network = AutoModelForCausalLM.from_pretrained(resolve_model("pydoc"), dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    expected = theirs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert [each.log_prob for each in completion.prompt_log_probs] == pytest.approx(expected, abs=1e-3)
    best = theirs.argmax(-1).tolist()
    assert sum(each.top[0][0] == token for each, token in zip(completion.prompt_log_probs, best, strict=True)) > 395


@pytest.mark.parametrize("rows", [8, 17, 64, 256])
@pytest.mark.parametrize("method", [None, "perfect", "liar"])
def test_chunks_and_drafts_change_nothing(
    expected: dict[str, Scores], plain: dict[str, object], dtype: torch.dtype, rows: int, method: str | None
) -> None:
    source = NoDraftClient() if method is None else drafting(method, dtype, 2)
    requests = asking(every=2)
    results = run(engine(llama(dtype), source, max_num_batched_rows=rows), requests)
    check(results, requests, expected)
    assert drawn(results) == plain


@pytest.mark.parametrize(("scored", "at_once"), [(1, 64), (13, 5), (256, 1)])
def test_how_many_rows_are_scored_at_once_changes_nothing(
    expected: dict[str, Scores],
    plain: dict[str, object],
    dtype: torch.dtype,
    scored: int,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_SCORED_ROWS", scored)
    monkeypatch.setattr(model_pass, "SCORED_AT_ONCE", at_once)
    requests = asking()
    target = engine(llama(dtype), drafting("perfect", dtype, 2))
    results = {request.request_id: Delta(request.request_id) for request in requests}
    for request in requests:
        target.submit(request)
    while target.busy:
        deltas = target.step()
        assert sum(len(part.entries) for delta in deltas for part in delta.prompt_log_probs) <= scored
        for delta in deltas:
            results[delta.request_id].extend(delta)
    check(results, requests, expected)
    assert drawn(results) == plain


def test_cached_blocks_are_scored_and_filled(
    expected: dict[str, Scores], plain: dict[str, object], dtype: torch.dtype
) -> None:
    """The prompts are in the cache, then they are scored, then they come from the cache again."""
    target = engine(llama(dtype), NoDraftClient())
    run(target, generation_requests())
    for together in (1, 100):
        requests = asking()
        results = run(target, requests, together)
        check(results, requests, expected)
        assert drawn(results) == plain
        assert all(each.usage is not None and each.usage.cached_tokens == 0 for each in results.values())
    fresh = engine(llama(dtype), NoDraftClient())
    run(fresh, asking(max_tokens=0))
    results = run(fresh, generation_requests())
    assert drawn(results) == plain
    assert sum(each.usage.cached_tokens for each in results.values() if each.usage) > 300


@pytest.mark.parametrize("rows", [16, 256])
def test_preemption_changes_nothing(
    expected: dict[str, Scores], plain: dict[str, object], dtype: torch.dtype, rows: int
) -> None:
    """A preempted request goes on where it stopped to score."""
    requests = asking()
    target = engine(llama(dtype, slots=256), drafting("draft_model", dtype, 2), nodes=8, max_num_batched_rows=rows)
    steps: list[StepStats] = []
    results = run(target, requests, steps=steps)
    check(results, requests, expected)
    assert drawn(results) == plain
    assert sum(step.preemptions for step in steps) > 3


@pytest.mark.parametrize("rows", [8, 256])
def test_a_prompt_without_output_has_the_same_scores(
    expected: dict[str, Scores], dtype: torch.dtype, rows: int
) -> None:
    requests = asking(max_tokens=0)
    results = run(engine(llama(dtype), drafting("perfect", dtype, 2), max_num_batched_rows=rows), requests)
    check(results, requests, expected)
    assert all((each.tokens, each.finish_reason) == ([], "length") for each in results.values())


def test_a_resumed_request_scores_its_prompt_and_not_its_output(
    expected: dict[str, Scores], plain: dict[str, object], dtype: torch.dtype
) -> None:
    whole = run(engine(llama(dtype), NoDraftClient()), generation_requests())
    resumed = [replace(each, committed=whole[each.request_id].tokens[:20]) for each in asking()]
    results = run(engine(llama(dtype), drafting("perfect", dtype, 2)), resumed)
    check(results, resumed, expected)
    for request in resumed:
        assert [*request.committed, *results[request.request_id].tokens] == whole[request.request_id].tokens
