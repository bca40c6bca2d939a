"""What `paceline bench peers --sizes real` makes of its measurements."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from paceline.launcher import StartError
from paceline.model_names import QWEN_05B, QWEN_15B, SMOLLM2
from paceline_lab.bench.bench_measurement import PLAIN, Measurement
from paceline_lab.bench.real_comparison import (
    LLAMA,
    OURS,
    REFERENCE,
    TRANSFORMERS,
    Load,
    RealBenchOptions,
    RealResult,
    Runner,
    our_methods,
    ratios,
)
from paceline_lab.bench.start_time import Start

Speeds = Mapping[tuple[str, str, str], float]


def found(speeds: Speeds) -> dict[str, float]:
    return ratios(
        [
            {"load": load, "engine": engine, "method": method, "tokens_per_s": speed}
            for (load, engine, method), speed in speeds.items()
        ]
    )


@pytest.mark.parametrize(
    ("name", "load"),
    [("plain", "short"), ("batch8", "batch8"), ("prompt_512", "prompt_512"), ("prompt_4096", "prompt_4096")],
)
def test_plain_decoding_is_compared_with_plain_decoding(name: str, load: str) -> None:
    speeds = {(load, OURS, PLAIN): 30.0, (load, OURS, "suffix"): 90.0, (load, LLAMA, PLAIN): 20.0}
    assert found(speeds)[name] == 1.5


@pytest.mark.parametrize("load", ["code", "edits"])
def test_the_best_methods_are_compared(load: str) -> None:
    ours = {(load, OURS, PLAIN): 30.0, (load, OURS, "suffix"): 90.0}
    theirs = {(load, LLAMA, PLAIN): 20.0, (load, LLAMA, "ngram-mod"): 45.0}
    assert found({**ours, **theirs}) == {f"best_{load}": 2.0, f"speculative_{load}": 3.0}


def test_plain_decoding_is_the_best_where_drafts_cost_more() -> None:
    speeds = {("code", OURS, PLAIN): 30.0, ("code", OURS, "suffix"): 15.0, ("code", LLAMA, PLAIN): 20.0}
    assert found(speeds) == {"best_code": 1.5, "speculative_code": 0.5}


def test_names_of_ratios_have_no_point() -> None:
    assert found({("chat_0.8", OURS, PLAIN): 30.0, ("chat_0.8", OURS, "suffix"): 33.0}) == {"speculative_chat_08": 1.1}


def test_an_engine_that_was_not_measured_has_no_ratio() -> None:
    assert found({("short", OURS, PLAIN): 30.0, ("batch8", LLAMA, PLAIN): 20.0}) == {}


@pytest.fixture
def result() -> RealResult:
    """Two prompts; with drafts, the second one differs."""
    result = RealResult(Console(file=io.StringIO()))
    outputs = {(OURS, PLAIN): ([1, 2], [3, 4]), (OURS, "suffix"): ([1, 2], [3, 5]), (LLAMA, PLAIN): ([6, 7], [8, 9])}
    for (engine, method), tokens in outputs.items():
        this = result.measured.setdefault((SMOLLM2, "code", engine, method), Measurement())
        for prompt, output in enumerate(tokens):
            this.add(prompt, [output], seconds=0.1)
    return result


def test_outputs_are_compared_with_the_engine_s_own_plain_decoding(result: RealResult) -> None:
    equal = {(row["engine"], row["method"]): (row["equal"], row["outputs"]) for row in result.rows()}
    assert equal == {(OURS, PLAIN): (2, 2), (OURS, "suffix"): (1, 2), (LLAMA, PLAIN): (2, 2)}


def test_the_summary_is_one_line_of_json_with_the_ratios_of_each_model(result: RealResult) -> None:
    result.starts = {(SMOLLM2, OURS): Start(3.0, 10**8), (SMOLLM2, LLAMA): Start(2.0, 10**8)}
    result.memory[SMOLLM2] = 1.25
    result.leave_out("llama.cpp cannot be built: no compiler")
    summary = json.loads(json.dumps(result.summary()))
    ratios = {"best_code": 1.0, "speculative_code": 1.0, "start": 1.5, "memory": 1.25}
    assert summary["real"] == {SMOLLM2: ratios}
    assert summary["left_out"] == ["llama.cpp cannot be built: no compiler"]
    assert len(summary["rows"]) == 3


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(StartError, match="there is no 'pydoc'"):
        RealBenchOptions(models=["pydoc"])


def test_a_quick_run_has_fewer_prompts_and_tokens() -> None:
    quick, whole = RealBenchOptions(quick=True), RealBenchOptions()
    assert (quick.prompts, quick.max_tokens) < (whole.prompts, whole.max_tokens)
    assert set(quick.models) == {SMOLLM2, QWEN_05B, QWEN_15B}


def test_a_model_drafts_by_what_there_is_for_it() -> None:
    assert set(our_methods(QWEN_05B, None)) == {"suffix"}
    head = our_methods(SMOLLM2, None)
    assert set(head) == {"suffix", "eagle3", "suffix + eagle3"}
    assert head["eagle3"]["model"] == "smollm2-135m-eagle3"
    drafted = our_methods(QWEN_15B, Path("draft.gguf"))
    assert set(drafted) == {"suffix", "draft_model", "suffix + draft_model"}
    assert drafted["suffix + draft_model"]["model"] == "draft.gguf"
    assert all(each["suffix_decoding_max_cached_requests"] == 0 for name, each in drafted.items() if "suffix" in name)


def test_transformers_is_measured_for_reference_alone() -> None:
    loads = {"short": Load([[1]], plain_only=True), "code": Load([[1]]), "batch8": Load([[1]], batch=8)}

    def taken(engine: str, method: str, batch: int | None = None) -> list[str]:
        runner = Runner(engine, method, process=None, batch=batch)  # type: ignore[arg-type]
        return [name for name, load in loads.items() if runner.takes(name, load)]

    assert taken(TRANSFORMERS, PLAIN) == ["short"]
    assert taken(OURS, PLAIN) == ["short", "code", "batch8"]
    assert taken(OURS, "suffix") == ["code", "batch8"]
    assert taken(LLAMA, PLAIN, batch=1) == ["short", "code"]
    assert set(REFERENCE) == {"short", "prompt_512"}
