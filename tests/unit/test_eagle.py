"""EAGLE-1 and -2 heads: every published variant computes the authors' formula; unsuitable checkpoints are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods.eagle import EagleNetwork, matches
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_checkpoints import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCABULARY,
    eagle_tensors,
    llama_config,
    renamed,
    save_head,
    target_network,
    target_weights,
)
from tests.helpers.head_formulas import Eagle1, Shape
from tests.helpers.head_rounds import compare


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


@dataclass(frozen=True)
class Variant:
    """`tensors` by the original's names. `stored`: as the file has them, if it differs. `shape`: see `Shape`."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any] = field(default_factory=llama_config)
    stored: Mapping[str, Tensor] | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


PLAIN, HASS = eagle_tensors(), eagle_tensors(norms=True)
OWN_EMBEDDING = {"embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))}
LIBRARY = eagle_tensors(bias=True, norms=True)
LIBRARY_NAMES = {
    "fc.weight": "fusion_fc.weight",
    "fc.bias": "fusion_fc.bias",
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
}
LIBRARY_CONFIG = {
    "speculators_model_type": "eagle",
    "layernorms": True,
    "fusion_bias": True,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
    },
}
THETA = {"rope_theta": 500000.0}
VARIANTS = {
    "no bias": Variant(PLAIN, llama_config(bias=False)),
    "a bias that is not configured": Variant(eagle_tensors(bias=True)),
    "a bias that is denied": Variant(eagle_tensors(bias=True), llama_config(bias=False)),
    "Qwen2's biases": Variant(eagle_tensors(qkv_bias=True), llama_config(qkv_bias=True)),
    "HASS's norms": Variant(HASS),
    "HASS's name of the input norm": Variant(
        HASS, stored=renamed(HASS, lambda name: name.replace("layers.0.input_layernorm", "hidden_layernorm"))
    ),
    "rotary base": Variant(PLAIN, llama_config(**THETA), shape={"theta": 500000.0}),
    "the user's rotary base": Variant(
        PLAIN, llama_config(**THETA), shape={"theta": 100.0}, options={"rope_theta": 100.0}
    ),
    "linear scaling": Variant(
        PLAIN, llama_config(rope_scaling={"type": "linear", "factor": 4.0}), shape={"linear": 4.0}
    ),
    "epsilon": Variant(HASS, llama_config(rms_norm_eps=0.5), shape={"eps": 0.5}),
    "own embedding": Variant(PLAIN | OWN_EMBEDDING),
    "prefixed names": Variant(
        PLAIN,
        stored=renamed(PLAIN, lambda name: f"model.{name}") | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)},
    ),
    "speculators library": Variant(
        LIBRARY,
        LIBRARY_CONFIG,
        renamed(LIBRARY, lambda name: LIBRARY_NAMES.get(name, name.replace("layers.0.", "transformer."))),
    ),
}


def check(folder: Path, target: TargetWeights, variant: Variant, **tolerance: float) -> None:
    checkpoint = Checkpoint(save_head(folder, variant.stored or variant.tensors, variant.config))
    assert matches(checkpoint)
    network = target_network()
    formula = Eagle1(variant.tensors, network.model.embed_tokens.weight, network.lm_head.weight, Shape(**variant.shape))
    compare(EagleNetwork(checkpoint, target, 256, **variant.options), formula, **tolerance)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_computes_the_formula(variant: Variant, target: TargetWeights, tmp_path: Path) -> None:
    check(tmp_path, target, variant)


def test_a_head_runs_in_the_targets_dtype(tmp_path: Path) -> None:
    check(tmp_path, target_weights(torch.bfloat16), VARIANTS["a bias that is not configured"], tolerance=0.05)


def without(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def changed(**keys: Any) -> dict[str, Any]:
    """A key that is None is left out."""
    return {key: value for key, value in (llama_config() | keys).items() if value is not None}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (None, "has no config.json"),
        (changed(hidden_size=128), "is a head for hidden size 128, target has 64: choose one for it"),
        (changed(intermediate_size=100), "layers.0.mlp.gate_proj.weight in .* has shape .96, 64. where .100, 64."),
        (changed(hidden_size=None), "names no hidden_size"),
        (changed(hidden_size="wide"), "describes no decoder: .*hidden_size"),
        (changed(num_attention_heads=0), "describes no decoder: "),
        (changed(num_attention_heads=3), "describes no decoder: .*64.*number of attention heads"),
        (changed(rope_scaling={"type": "mystery"}), "'mystery'"),
        (changed(rope_scaling={"type": "yarn"}), "describes no decoder: .*factor"),
        (changed(hidden_act="gelu"), "'gelu'"),
    ],
)
def test_an_unsuitable_configuration_is_refused(
    config: dict[str, Any] | None, complaint: str, target: TargetWeights, tmp_path: Path
) -> None:
    refused(save_head(tmp_path, PLAIN, config), target, complaint)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (
            without(PLAIN, "layers.0.post_attention_layernorm.weight"),
            "has no tensor layers.0.post_attention_layernorm.weight: it is incomplete",
        ),
        (
            without(eagle_tensors(qkv_bias=True), "layers.0.self_attn.k_proj.bias"),
            "has no tensor layers.0.self_attn.k_proj.bias",
        ),
        (
            PLAIN | {"layers.0.mlp.gate_proj.bias": torch.zeros(96)},
            "layers.0.mlp.gate_proj.bias, which is no part of the EAGLE heads",
        ),
        (
            PLAIN | {"embed_tokens.weight": torch.zeros(VOCABULARY + 1000, HIDDEN)},
            r"embed_tokens.weight in .* has shape \[1096, 64\] where \[96, 64\] is needed.*vocabulary 96",
        ),
    ],
    ids=["a norm missing", "one of three biases missing", "an unknown tensor", "another vocabulary"],
)
def test_unsuitable_tensors_are_refused(
    tensors: dict[str, Tensor], complaint: str, target: TargetWeights, tmp_path: Path
) -> None:
    refused(save_head(tmp_path, tensors, llama_config()), target, complaint)


def refused(folder: Path, target: TargetWeights, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        EagleNetwork(Checkpoint(folder), target, 256)
    assert "\n" not in str(caught.value)
