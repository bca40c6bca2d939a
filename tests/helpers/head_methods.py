"""One small head of every method for the peaked Llama: random tensors by their published names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator
from paceline.drafting.speculator import Speculator
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers import head_checkpoints
from tests.helpers.dense import HIDDEN
from tests.helpers.head_checkpoints import eagle3_tensors, eagle_tensors, llama_config, save_head
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.markov import mlp_config
from tests.helpers.parallel import DFLASH, PEAGLE, dflash_tensors, peagle_tensors

Tensors = dict[str, Tensor]
INNER = 24
STEPS = 3
"""Medusa heads, and steps of an MLP speculator."""
AHEAD = 4


def target_weights(slots: int = 256) -> TargetWeights:
    return build(peaked_llama(), "target", EngineConfig(slots=slots), "print", []).target_weights()


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * shape[-1] ** -0.5


def medusa_layers(head: int, count: int = 1, *, repeated: bool = False) -> Tensors:
    """The residual layers of one head, by the original's names."""
    tensors = {}
    for n in range(count):
        seed = 100 * head + (0 if repeated else n)
        tensors[f"{head}.{n}.linear.weight"] = seeded(HIDDEN, HIDDEN, seed=seed)
        tensors[f"{head}.{n}.linear.bias"] = seeded(HIDDEN, seed=seed)
    return tensors


def medusa_tensors(heads: int = STEPS, count: int = 1, rows: int = VOCABULARY, *, repeated: bool = False) -> Tensors:
    """The original's version 1: every head has an output matrix with `rows` rows."""
    tensors = {}
    for head in range(heads):
        tensors |= medusa_layers(head, count, repeated=repeated)
        tensors[f"{head}.{count}.weight"] = 4 * seeded(rows, HIDDEN, seed=head)
    return tensors


def mlp_tensors(steps: int = STEPS, inner: int = INNER, emb: int = VOCABULARY, head: int = VOCABULARY) -> Tensors:
    """IBM's names. `emb` and `head`: rows of the embeddings and output matrices."""
    tensors = {}
    for i in range(steps):
        tensors[f"emb.{i}.weight"] = seeded(emb, inner, seed=i)
        tensors[f"proj.{i}.weight"] = seeded(inner, inner if i else HIDDEN, seed=10 + i)
        tensors[f"ln.{i}.weight"] = 1 + seeded(inner, seed=20 + i)
        tensors[f"ln.{i}.bias"] = seeded(inner, seed=30 + i)
        tensors[f"head.{i}.weight"] = 5 * seeded(head, inner, seed=40 + i)
    return tensors


def mtp_tensors() -> Tensors:
    """As the speculators library writes a layer for a Llama."""
    generator = torch.Generator().manual_seed(21)
    tensors = head_checkpoints.layer(generator, "mtp_layers.0", into=HIDDEN)
    for name in ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"mtp_layers.0.{name}.weight"] = head_checkpoints.random(generator, HIDDEN)
    tensors["mtp_layers.0.input_proj.weight"] = head_checkpoints.random(generator, HIDDEN, 2 * HIDDEN)
    return tensors


@dataclass(frozen=True)
class HeadMethod:
    """`required`: a tensor without which the checkpoint is refused."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    required: str


HEAD_METHODS: dict[str, HeadMethod] = {
    "eagle": HeadMethod(eagle_tensors(bias=True), llama_config(), "layers.0.self_attn.k_proj.weight"),
    "eagle3": HeadMethod(
        eagle3_tensors(columns=VOCABULARY), llama_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "norm.weight"
    ),
    "mtp": HeadMethod(mtp_tensors(), {"speculators_model_type": "mtp"}, "mtp_layers.0.mlp.up_proj.weight"),
    "peagle": HeadMethod(peagle_tensors(), PEAGLE, "fc.weight"),
    "dflash": HeadMethod(dflash_tensors(), DFLASH, "layers.1.mlp.up_proj.weight"),
    "medusa": HeadMethod(medusa_tensors(), {"medusa_num_heads": 2}, "1.0.linear.weight"),
    "mlp_speculator": HeadMethod(mlp_tensors(), mlp_config(STEPS), "ln.2.bias"),
}


def save_method(folder: Path, method: str) -> Path:
    return save_head(folder, HEAD_METHODS[method].tensors, HEAD_METHODS[method].config)


def build_head(folder: Path, method: str, target: TargetWeights | None = None, **settings: Any) -> Speculator:
    """As a service builds it, with every guess likely enough."""
    options = {"num_speculative_tokens": AHEAD, "tree_width": 2, "least_path_probability": 0} | settings
    config = SpeculativeConfig(method=method, model=str(folder), **options)  # type: ignore[arg-type]
    return build_speculator(
        config, EngineConfig(slots=1024), partial(target_weights) if target is None else lambda: target
    )
