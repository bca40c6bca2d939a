"""The coupled worker in a real vLLM: tokens depend on seeds, not on drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.engines import COUPLED, PROMPTS, STEADY, draft, drafting, generate, vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HEAD_LAYERS = (2, 13, 23)
"""What the shipped EAGLE-3 head reads."""
RULES: list[dict[str, Any]] = [
    {},
    {"top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"min_tokens": 30, "stop_token_ids": [10, 11]},
    {"extra_args": {"paceline": '{"sampling": {"min_p": 0.05, "logit_bias": {"12": 2.0}}}'}},
    {"allowed_token_ids": list(range(3, 400))},
    {"bad_words": ["self", "return"]},
    {"structured_outputs": {"regex": "[a-z ]{40,60}"}},
]
BATCH = [
    (PROMPTS[index % len(PROMPTS)], {"temperature": 0.8, "max_tokens": 40, "seed": index, **RULES[index % len(RULES)]})
    for index in range(64)
]


GREEDY = [(prompt, {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}) for prompt in PROMPTS]

Outputs = list[list[int]]


@pytest.fixture(scope="module")
def plain() -> tuple[Outputs, Outputs]:
    """Without drafts: the outputs of `BATCH` and of `GREEDY`."""
    with vllm_engine([BATCH, GREEDY], **COUPLED) as engine:
        sampled = engine.outputs()
        engine.go_on()
        return sampled, engine.outputs()


def test_it_starts_with_a_compiled_model() -> None:
    """vLLM then runs its samplers without any request, to measure its memory."""
    traced = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}  # without Inductor's minute
    outputs, _ = generate(BATCH[:2], dtype="bfloat16", **traced, **COUPLED, **drafting("127.0.0.1:1"))
    assert len(outputs) == 2


def test_sampled_tokens_do_not_depend_on_drafts(plain: tuple[Outputs, Outputs]) -> None:
    with draft() as worker:
        outputs, (accepted, _) = generate(BATCH, **COUPLED, **drafting(worker.address, lookups=["ngram"], **STEADY))
    different = [index for index, pair in enumerate(zip(plain[0], outputs, strict=True)) if pair[0] != pair[1]]
    assert different == []
    assert accepted > 300
    assert len({tuple(tokens) for tokens in plain[0]}) > 50


def test_a_head_on_another_machine_reads_hidden_states(plain: tuple[Outputs, Outputs]) -> None:
    """Of new positions, and the second time of those in the prefix cache."""
    with draft({"method": "eagle3", "model": "pydoc-eagle3"}) as worker:
        pool = drafting(worker.address, hidden_state_layers=HEAD_LAYERS, **STEADY)
        with vllm_engine([GREEDY, GREEDY], **COUPLED, **pool) as engine:
            first = engine.outputs()
            engine.go_on()
            outputs, (accepted, drafted) = [first, engine.outputs()], engine.accepted()
    assert outputs == [plain[1], plain[1]]
    assert 0.4 * drafted < accepted > 300
