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
)
REFUSED = {
    "xglm": "its 2 layers attend 0 times by way of transformers' attention interface",
    "minimax": "its 2 layers attend 1 times",
    "rwkv": "its 2 layers attend 0 times",
    "mimo_v2_flash": "its layers differ in their attention heads",
}


@pytest.mark.parametrize("architecture", EQUAL)
def test_tokens_are_those_of_transformers(architecture: str) -> None:
    assert judge(architecture) == Verdict(architecture, "equal")


@pytest.mark.parametrize(("architecture", "why"), REFUSED.items())
def test_an_architecture_that_differs_is_refused_with_a_reason(architecture: str, why: str) -> None:
    verdict = judge(architecture)
    assert verdict.what == "refused"
    assert why in verdict.why
