"""Drafts, batches and wrong guesses change no token of a published model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline import family
from paceline.cli.model_download import download
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.drafting import complete_config
from paceline.family import PUBLISHED_HEADS
from paceline.llm import LLM
from paceline.model_names import QWEN_05B, SMOLLM2

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

PROMPTS = (
    "def quicksort(items):\n",
    "The history of the city begins",
    "import json\n\n\ndef load(path):\n    return json.load(open(path))\n\n\ndef save(path, data):",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "class Stack:\n    def __init__(self):\n",
)
TOKENS = 32
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS)
    for temperature in (0.0, 0.8)
    for seed in range(len(PROMPTS))
]
REQUESTS = PROMPTS * 2
"""Each at both temperatures."""
DRAFTS = {SMOLLM2: SMOLLM2}
"""By target; of others the draft is the small Qwen."""

LOCKSTEP = {"draft_schedule": "lockstep"}
"""A step waits for drafts, whether that pays or not."""

Tokens = list[list[int]]


class Plain(NamedTuple):
    llm: LLM
    outputs: Tokens
    """Of each request alone."""


@pytest.fixture(scope="module")
def plain(path: Path) -> Plain:
    config = {"threads": 2, "max_model_len": 1024, "slots": 4096, "enable_prefix_caching": False}
    llm = LLM(str(path), None, config)
    alone = [llm.generate(prompt, params)[0].tokens for prompt, params in zip(REQUESTS, PARAMS, strict=True)]
    return Plain(llm, alone)


def drafted(llm: LLM, speculation: dict[str, Any]) -> tuple[Tokens, int]:
    """Outputs of all requests at once, and how many of their tokens were drafted."""
    completions = llm.with_speculation({"row_budget": False, **speculation}).generate(REQUESTS, PARAMS)
    return [each.tokens for each in completions], sum(sum(each.accepted) for each in completions)


def different(outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> list[int]:
    """The requests whose outputs differ."""
    return [index for index, pair in enumerate(zip(outputs, expected, strict=True)) if pair[0] != pair[1]]


def test_a_batch_changes_no_token(plain: Plain) -> None:
    together = [each.tokens for each in plain.llm.generate(REQUESTS, PARAMS)]
    assert different(together, plain.outputs) == []
    assert sum(map(len, together)) > len(REQUESTS) * TOKENS / 2


def test_lookups_change_no_token(plain: Plain) -> None:
    outputs, accepted = drafted(plain.llm, {"method": ["suffix", "ngram"]})
    assert different(outputs, plain.outputs) == []
    assert accepted > 10


def test_a_smaller_model_changes_no_token(plain: Plain, name: str) -> None:
    draft = download(DRAFTS.get(name, QWEN_05B))
    speculation = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 4,
        "tree_width": 2,
        **LOCKSTEP,
    }
    outputs, accepted = drafted(plain.llm, speculation)
    assert different(outputs, plain.outputs) == []
    assert accepted > 20


def test_a_head_changes_no_token(plain: Plain, name: str) -> None:
    if name not in PUBLISHED_HEADS:
        pytest.skip("no head ships for it")
    assert complete_config(SpeculativeConfig(method="auto"), name).model == str(family.path(PUBLISHED_HEADS[name]))
    outputs, accepted = drafted(
        plain.llm, {"method": ["suffix", "eagle3"], "model": PUBLISHED_HEADS[name], "tree_width": 2, **LOCKSTEP}
    )
    assert different(outputs, plain.outputs) == []
    assert accepted > 20


def test_trees_that_are_half_wrong_change_no_token(plain: Plain, tmp_path: Path) -> None:
    prompts = [plain.llm.tokenizer.encode(prompt) for prompt in REQUESTS]
    texts = [prompt + output for prompt, output in zip(prompts, plain.outputs, strict=True)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    oracle = {
        "method": "custom",
        "speculator": "tests.real.half_wrong.HalfWrong",
        "model": str(tmp_path / "texts.json"),
    }
    outputs, accepted = drafted(plain.llm, {**oracle, "num_speculative_tokens": 4, "tree_width": 3, **LOCKSTEP})
    assert different(outputs, plain.outputs) == []
    assert accepted > 20
