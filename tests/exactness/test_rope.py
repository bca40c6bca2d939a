"""Rotary frequencies are chosen once, where transformers chooses them by the longest sequence of a pass."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.config import EngineConfig
from paceline.model.loading import build
from tests.exactness.test_rows import one_by_one

VOCABULARY, ORIGINAL, LONGEST = 96, 64, 256
ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def network(kind: str, rope: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=ROPES[rope],
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(6)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("kind", "rope", "max_model_len", "size"),
    [
        ("llama", "longrope", None, 100),
        ("llama", "longrope", ORIGINAL, 60),
        ("llama", "dynamic", None, 100),
        ("phi3", "longrope", None, 100),
        ("phi3", "longrope", ORIGINAL, 60),
        ("olmo2", "dynamic", None, 100),
    ],
)
def test_logits_are_those_of_a_text_of_the_longest_length(
    kind: str, rope: str, max_model_len: int | None, size: int
) -> None:
    """transformers uses LongRoPE's long factors for a text beyond the original positions, else the short ones. Here the
    first tokens are alone in their passes, and have the same numbers as in a long text."""
    tokens = random.Random(3).choices(range(VOCABULARY), k=size)
    with torch.inference_mode():
        theirs = network(kind, rope)(torch.tensor([tokens]), use_cache=False).logits[0]
    model = build(network(kind, rope), kind, EngineConfig(slots=256, max_model_len=max_model_len), "", [])
    ours = torch.stack(one_by_one(model, tokens))
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
