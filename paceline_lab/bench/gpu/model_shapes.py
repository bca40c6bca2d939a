"""Shapes of published models, as transformers' configurations have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Shape = Mapping[str, Any]
LLAMA_8B: Shape = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""As in the config.json of meta-llama/Llama-3.1-8B; its rotary frequencies are left at Llama's default."""
QWEN_14B: Shape = {
    **LLAMA_8B,
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
}
"""As in the config.json of Qwen/Qwen3-14B."""
QWEN_0_8B: Shape = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
"""Of Qwen3.5-0.8B's text model. Every fourth layer attends, the others keep states, as transformers' defaults are."""
TINY: Shape = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""What a CPU has instead: of the shipped models' vocabulary."""


def shape_for(shape: Shape, device: torch.device) -> Shape:
    """The shape, or a tiny one of the same kind on a CPU."""
    return {**shape, **TINY} if device.type == "cpu" else shape
