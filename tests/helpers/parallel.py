"""Drafts that guess several tokens in one pass, for the peaked Llama: random weights by their published names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafting.methods.dflash import DFlashNetwork, DFlashSpeculator
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.pard import PardSpeculator
from paceline.drafting.methods.peagle import PEagleSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model import Model
from paceline.model.checkpoint import Checkpoint
from tests.helpers.dense import HEADS, HIDDEN, INNER, KV_HEADS, SIZE, layer_tensors, random
from tests.helpers.llamas import VOCABULARY

BLOCK = 5
MASK = 60
DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
DFLASH: dict[str, Any] = {
    **DECODER,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}
"""As z-lab publishes them."""
DFLASH_OF_THE_LIBRARY: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {**DECODER, "model_type": "qwen3"},
    "draft_vocab_size": VOCABULARY,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": [0, 2],
    "mask_token_id": MASK,
}
PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "transformer_layer_config": {**DECODER, "model_type": "llama"},
    "draft_vocab_size": VOCABULARY,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "mask_token_id": MASK,
}


def dflash_tensors(states: int = 2) -> dict[str, Tensor]:
    """Two layers over so many states of the target."""
    torch.manual_seed(5)
    named = {
        "fc.weight": random(HIDDEN, states * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
    }
    for n in range(2):
        named |= layer_tensors(f"layers.{n}", head_norms=True)
    return named


def peagle_tensors() -> dict[str, Tensor]:
    """Two layers, and an embedding that was trained, too."""
    torch.manual_seed(6)
    named = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": 2 * random(VOCABULARY, HIDDEN),
        "embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "mask_hidden": torch.randn(1, 1, 3 * HIDDEN),
        "layers.0.hidden_norm.weight": random(HIDDEN),
    }
    return named | layer_tensors("layers.0", 2 * HIDDEN) | layer_tensors("layers.1")


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def drafting_for(target: Model, method: str, folder: Path, ahead: int = 4, width: int = 3) -> Speculator:
    """A draft of this method. That of `pard` is the target itself, so that its first guess is right."""
    if method == "pard":
        return PardSpeculator(target, MASK, ahead, width, 0.0)
    if method == "dflash":
        network = DFlashNetwork(save(folder, DFLASH, dflash_tensors()), target.target_weights(), target.slots)
        return DFlashSpeculator(network, target.target_weights(), width, 0.0)
    checkpoint = save(folder, PEAGLE, peagle_tensors())
    return PEagleSpeculator(
        Eagle3Network(checkpoint, target.target_weights(), target.slots),
        checkpoint,
        target.target_weights(),
        ahead,
        width,
        0.0,
    )
