"""Drafts that predict several tokens in one pass, for the peaked Llama: random weights by their published names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafting.best_first import ModelNetwork
from paceline.drafting.block import BlockRequest, Blocks, MaskTokens
from paceline.drafting.methods.dflash import DFlashNetwork
from paceline.drafting.methods.dspark import MarkovHead
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.peagle import mask_tokens
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftingLimits, Speculator
from paceline.model import Model
from paceline.model.checkpoint import Checkpoint
from tests.helpers.head_checkpoints import HEADS, HIDDEN, INNER, KV_HEADS, layer, random, reduced, save_head
from tests.helpers.llamas import VOCABULARY

BLOCK = 5
MASK = 60
DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
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
"""As in z-lab's checkpoints."""
DFLASH_OF_THE_LIBRARY: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {**DECODER, "model_type": "qwen3"},
    "draft_vocab_size": VOCABULARY,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": [0, 2],
    "mask_token_id": MASK,
}
RANK = 6
CANDIDATES = 8
DFLASH2: dict[str, Any] = {
    **DFLASH_OF_THE_LIBRARY,
    "speculators_model_type": "dflash2",
    **{"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": CANDIDATES},
}
DSPARK: dict[str, Any] = {
    **DFLASH_OF_THE_LIBRARY,
    "speculators_model_type": "dspark",
    **{"markov_rank": RANK, "markov_head_type": "vanilla", "sample_from_anchor": True},
}
XPRESS: dict[str, Any] = {
    **DFLASH_OF_THE_LIBRARY,
    "speculators_model_type": "xpress",
    **{"xpress_rank": RANK, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6},
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
    """Two layers over this number of target states."""
    generator = torch.Generator().manual_seed(5)
    named = {
        "fc.weight": random(generator, HIDDEN, states * HIDDEN),
        "hidden_norm.weight": random(generator, HIDDEN),
        "norm.weight": random(generator, HIDDEN),
    }
    for n in range(2):
        named |= layer(generator, f"layers.{n}", into=HIDDEN, head_norms=True)
        named[f"layers.{n}.input_layernorm.weight"] = random(generator, HIDDEN)
    return named


def dflash2_tensors(taps: int = 2, group: int = 4) -> dict[str, Tensor]:
    """With convolutions in both layers, and a selector."""
    generator = torch.Generator().manual_seed(7)
    named = {}
    for name in (f"layers.{n}.{part}_conv" for n in range(2) for part in ("attention", "mlp")):
        named[f"{name}.base_kernel"] = torch.randn(2, taps, HIDDEN, generator=generator)
        named[f"{name}.kernel_projection.weight"] = random(generator, 2 * taps * HIDDEN // group, HIDDEN)
    for side in ("predecessor", "successor"):
        named[f"candidate_selector.{side}_codebook"] = torch.randn(VOCABULARY, RANK, generator=generator)
    named["candidate_selector.hidden_projection.weight"] = random(generator, RANK, HIDDEN)
    return dflash_tensors() | named


def dspark_tensors(kind: str = "vanilla", columns: int = VOCABULARY) -> dict[str, Tensor]:
    """With a Markov head of this kind for so many columns."""
    generator = torch.Generator().manual_seed(8)
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (VOCABULARY, RANK), "markov_w2.weight": (columns, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * RANK, HIDDEN + 2 * RANK), "joint_proj.bias": (3 * RANK,)}
    named = {f"markov_head.{name}": random(generator, *shape) for name, shape in shapes.items()}
    return dflash_tensors() | named


def xpress_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes: dict[str, tuple[int, ...]] = {"token_embed": (VOCABULARY, RANK), "readout": (VOCABULARY, RANK)}
    shapes |= {"down_h": (RANK, HIDDEN), "down_g": (RANK, HIDDEN), "in_proj": (RANK, 3 * RANK)}
    shapes |= {"mlp_gate": (12, RANK), "mlp_up": (12, RANK), "mlp_down": (RANK, 12)}
    named = {f"refiner_head.{name}.weight": random(generator, *shape) for name, shape in shapes.items()}
    return dflash_tensors() | named | {"refiner_head.mix_l": random(generator, RANK, BLOCK, BLOCK)}


def peagle_tensors() -> dict[str, Tensor]:
    """Two layers, and an embedding of its own."""
    generator = torch.Generator().manual_seed(6)
    named = {
        "fc.weight": random(generator, HIDDEN, 3 * HIDDEN),
        "lm_head.weight": 2 * random(generator, VOCABULARY, HIDDEN),
        "embed_tokens.weight": random(generator, VOCABULARY, HIDDEN),
        "mask_hidden": torch.randn(1, 1, 3 * HIDDEN, generator=generator),
    }
    norms = ("norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.1.input_layernorm")
    named |= {f"{name}.weight": random(generator, HIDDEN) for name in norms}
    return named | layer(generator, "layers.0", into=2 * HIDDEN) | layer(generator, "layers.1", into=HIDDEN)


def reduced_vocabulary(step: int) -> tuple[dict[str, Tensor], list[int]]:
    """Every `step`-th token: an output matrix, `d2t` and `t2d`; and the tokens."""
    ids = list(range(1, VOCABULARY, step))
    matrix = random(torch.Generator().manual_seed(step), len(ids), HIDDEN)
    return {"lm_head.weight": matrix} | reduced(ids, VOCABULARY), ids


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Checkpoint:
    return Checkpoint(save_head(folder, weights, dict(config)))


def drafting_for(target: Model, method: str, folder: Path, ahead: int = 4, width: int = 3) -> Speculator:
    """A draft of this method. The model of `pard` is the target, so its first guess is right."""
    limits, weights = DraftingLimits(width), target.target_weights
    if method == "pard":
        return pard_draft(target, ahead, width)
    if method == "dflash":
        blocks = DFlashNetwork(save(folder, DFLASH, dflash_tensors()), weights(), target.slots)
        return NetworkSpeculator(Blocks(blocks, limits))
    if method == "dspark":
        checkpoint = save(folder, DSPARK, dspark_tensors())
        blocks = DFlashNetwork(checkpoint, weights(), target.slots, None, method, MarkovHead)
        return NetworkSpeculator(Blocks(blocks, limits))
    checkpoint = save(folder, PEAGLE, peagle_tensors())
    network = Eagle3Network(checkpoint, weights(), target.slots, method="peagle")
    return NetworkSpeculator(Blocks(mask_tokens(network, checkpoint, weights(), ahead), limits))


def pard_draft(model: Model, ahead: int, width: int) -> NetworkSpeculator[BlockRequest]:
    return NetworkSpeculator(Blocks(MaskTokens(ModelNetwork(model, "pard"), MASK, ahead), DraftingLimits(width)))
