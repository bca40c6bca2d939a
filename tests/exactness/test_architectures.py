"""A part of `make models`: one architecture for each kind of attention."""

from __future__ import annotations

import pytest

from tests.exactness.architectures import Verdict, judge

EQUAL = (
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gpt_oss",
    "granite_swa",
    "phi3",
    "olmoe",
    "stablelm",
    "opt",
    "qwen3_next",
    "jamba",
    "mimo_v2_flash",
    "gemma4_text",
)
REFUSED = {
    "xglm": "2 of its 2 layers do not attend by way of transformers' attention interface",
    "minimax": "1 of its 2 layers do not attend",
    "rwkv": "nor keep a state that is known here",
    "hrm_text": "its layer 0 attends twice",
    "deepseek_v32": "index_topk: its layers attend to what an indexer chooses",
}


@pytest.mark.parametrize("architecture", EQUAL)
def test_tokens_are_those_of_transformers(architecture: str) -> None:
    assert judge(architecture) == Verdict(architecture, "equal")


@pytest.mark.parametrize(("architecture", "why"), REFUSED.items())
def test_an_architecture_that_differs_is_refused_with_a_reason(architecture: str, why: str) -> None:
    verdict = judge(architecture)
    assert verdict.what == "refused"
    assert why in verdict.why
