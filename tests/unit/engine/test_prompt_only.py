"""Requests that want nothing drawn (`max_tokens` 0), and prompts whose scores cannot be computed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.config import SamplingParams
from paceline.drafting.speculator import Opening
from paceline.engine.draft_client import NoDraftClient
from paceline.engine.engine import NOT_FINITE_ERROR
from paceline.llm import LLM
from paceline.messages import Delta, FinishReason
from paceline.telemetry.step_stats import StepStats
from tests.unit.engine.test_engine import SLOTS, Script, Watched, engine, generation_request, local, served


def scored(result: Delta) -> list[int]:
    """The positions that were scored, in order."""
    return [at for part in result.prompt_log_probs for at, _ in enumerate(part.entries, part.start)]


@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize("prompt", [1, 2, 17, SLOTS])
@pytest.mark.parametrize("top", [None, 0, 2])
def test_nothing_is_drawn_and_no_draft_opened(prompt: int, rows: int, top: int | None) -> None:
    script, steps = Script(), list[StepStats]()
    target = engine(script, max_num_batched_rows=rows)
    results = served(target, generation_request("a", prompt, output=0, prompt_logprobs=top), steps=steps)
    result = results["a"]
    assert (result.tokens, result.finish_reason, result.error) == ([], FinishReason.LENGTH, "")
    assert scored(result) == ([] if top is None else [*range(1, prompt)])
    assert script.of(Opening) == []
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (prompt, 0)
    assert sum(step.rows for step in steps) == sum(step.prompt_tokens for step in steps) == prompt
    assert result.stop_token is None


def test_a_prompt_that_leaves_no_room_is_refused_only_if_a_token_is_wanted() -> None:
    results = served(
        engine(NoDraftClient()), generation_request("a", SLOTS, output=1), generation_request("b", SLOTS + 1, output=0)
    )
    assert f"{SLOTS} tokens; there is room for {SLOTS - 1}" in results["a"].error
    assert f"{SLOTS + 1} tokens; there is room for {SLOTS}" in results["b"].error


def test_its_prompt_is_cached_for_others() -> None:
    target = engine(NoDraftClient())
    served(target, generation_request("a", 40, output=0))
    usage = served(target, generation_request("a", 40))["a"].usage
    assert usage is not None
    assert usage.cached_tokens == 32


def test_it_takes_no_other_request_s_tokens() -> None:
    """It ends in steps in which others draw and verify guesses."""
    others = [generation_request(name, 20, output=40) for name in "ab"]
    plain = served(engine(NoDraftClient()), *others)
    alone = [generation_request(name, 30, output=0, prompt_logprobs=1) for name in "cdef"]
    results = served(engine(local(), max_num_batched_rows=32), others[0], *alone[:2], others[1], *alone[2:])
    assert all(results[name].tokens == plain[name].tokens for name in "ab")
    assert all(scored(results[name]) == [*range(1, 30)] for name in "cdef")


def test_one_token_of_output_leaves_nothing_to_guess() -> None:
    """So no draft computes the prompt for it."""
    script = Script()
    result = served(engine(script), generation_request(output=1))["a"]
    assert len(result.tokens) == 1
    assert script.of(Opening) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("output", [0, 5])
def test_a_prompt_whose_scores_are_not_finite_ends_its_request_alone(value: float, output: int) -> None:
    """One bad row in the middle of the prompt; without scores nobody asks for it."""
    bad, good = (
        generation_request("b", 40, output=output, prompt_logprobs=1),
        generation_request("a", 9, output=12, prompt_logprobs=1),
    )
    model = Watched(bad=[bad.prompt[20]], value=value)
    assert not set(model._bad) & {*good.prompt, bad.prompt[-1]}
    plain = served(engine(NoDraftClient()), good)["a"]
    results = served(engine(NoDraftClient(), model=model, max_num_batched_rows=16), good, bad)
    assert (results["b"].finish_reason, results["b"].error) == (FinishReason.ERROR, NOT_FINITE_ERROR)
    assert max(scored(results["b"]), default=0) <= 20
    assert results["a"].tokens == plain.tokens
    assert results["a"].prompt_log_probs[0].entries == plain.prompt_log_probs[0].entries
    unscored = replace(bad, sampling=bad.sampling.model_copy(update={"prompt_logprobs": None}))
    assert served(engine(NoDraftClient(), model=model), unscored)["b"].error == ""


def test_minus_infinity_is_a_score() -> None:
    request = generation_request("b", 40, output=0, prompt_logprobs=1)
    result = served(engine(NoDraftClient(), model=Watched(bad=[request.prompt[20]], value=-math.inf)), request)["b"]
    assert scored(result) == [*range(1, 40)]


def test_from_python() -> None:
    llm = LLM("table:64", None, {"slots": 512, "max_num_batched_rows": 64})
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    whole, short = llm.generate([[1] * 100, "7"], params)
    assert (whole.text, whole.tokens, whole.finish_reason) == ("", [], FinishReason.LENGTH)
    assert [len(each.top) for each in whole.prompt_log_probs] == [2] * 99
    assert short.prompt_log_probs == []
