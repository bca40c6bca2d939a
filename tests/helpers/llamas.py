"""A tiny random Llama with peaked distributions, so that a copy with noise is a draft that mostly agrees."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import SamplingParams

VOCABULARY = 64
POSITIONS = 512


def peaked_llama(noise: float = 0.0) -> LlamaForCausalLM:
    """The same network every time, in float32, with normal noise of this scale added to the weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
    )
    torch.manual_seed(7)
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += noise * torch.randn_like(parameter)
    return network


LAWS = [
    SamplingParams(temperature=0.0, max_tokens=90, logprobs=2),
    SamplingParams(temperature=0.8, seed=11, max_tokens=80, logprobs=1, logprob_token_ids=(7, 3)),
    SamplingParams(temperature=1.0, seed=5, top_k=12, top_p=0.9, min_p=0.01, max_tokens=50),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=60),
    SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5, logit_bias={5: 2.0, 9: -100}, max_tokens=60),
    SamplingParams(temperature=1.0, seed=8, min_tokens=20, stop_token_ids=(1, 2, 3, 4), max_tokens=70),
    SamplingParams(
        temperature=1.0, seed=9, bad_words=((7,), (8, 9)), allowed_token_ids=tuple(range(3, 60)), max_tokens=40
    ),
    SamplingParams(temperature=1.3, seed=2**63 + 1, max_tokens=100),
]
"""Sampling parameters that use every rule, for a vocabulary of at least ten tokens."""
