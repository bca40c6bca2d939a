"""EAGLE heads: every published variant computes the authors' formula; unsuitable checkpoints are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods import eagle, eagle3
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.rows import SlotTable
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_checkpoints import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    eagle3_tensors,
    eagle_tensors,
    llama_config,
    random,
    reduced,
    renamed,
    save_head,
    target_model,
    target_network,
    target_weights,
    without,
)
from tests.helpers.head_formulas import Eagle1, Eagle3, Shape
from tests.unit.drafting.head_rounds import compare

IDS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
"""The target's tokens in a reduced vocabulary."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TARGET = target_network()
MATRICES = TARGET.model.embed_tokens.weight.detach(), TARGET.lm_head.weight.detach()


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


@dataclass(frozen=True)
class Variant:
    """`tensors` by the original's names. `stored`: as the file has them, if it differs.

    `formula` and `options`: keyword arguments of the formula and of the network.
    """

    tensors: Mapping[str, Tensor]
    config: dict[str, Any] = field(default_factory=llama_config)
    stored: Mapping[str, Tensor] | None = None
    formula: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def norms(*names: str, width: int = HIDDEN) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(19)
    return {f"{name}.weight": random(generator, width) for name in names}


def bare(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def changed(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A key that is None is left out."""
    return {key: value for key, value in (config | keys).items() if value is not None}


def library_config(layer: Mapping[str, Any] = MappingProxyType({}), **keys: Any) -> dict[str, Any]:
    """The speculators library's configuration, which omits transformers' defaults. A key that is None is left out."""
    llama = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    llama |= {"num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "model_type": "llama"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "transformer_layer_config": changed(llama, **layer),
        "draft_vocab_size": VOCABULARY,
        "norm_before_residual": False,
    }
    return changed(config, **keys)


def llama3_frequencies() -> Tensor:
    """Long waves are slowed down by `factor`, short ones not at all, those between in part."""
    frequencies = 5e5 ** -(torch.arange(8) / 8)
    turns = 64 * frequencies / (2 * math.pi)
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return frequencies * (share + (1 - share) / 8.0)


def as_many_keys_as_queries() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(23)
    return PLAIN | {f"midlayer.self_attn.{x}_proj.weight": random(generator, 64, 128) for x in ("k", "v")}


EAGLE, HASS = eagle_tensors(), eagle_tensors(norms=True)
FIRST_EMBEDDING = {"embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))}
LIBRARY = eagle_tensors(bias=True, norms=True)
LIBRARY_NAMES = {
    "fc.weight": "fusion_fc.weight",
    "fc.bias": "fusion_fc.bias",
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
}
THETA = {"rope_theta": 500000.0}
EAGLE_VARIANTS = {
    "no bias": Variant(EAGLE, llama_config(bias=False)),
    "a bias that is not configured": Variant(eagle_tensors(bias=True)),
    "a bias that is denied": Variant(eagle_tensors(bias=True), llama_config(bias=False)),
    "Qwen2's biases": Variant(eagle_tensors(qkv_bias=True), llama_config(qkv_bias=True)),
    "HASS's norms": Variant(HASS),
    "HASS's name of the input norm": Variant(
        HASS, stored=renamed(HASS, lambda name: name.replace("layers.0.input_layernorm", "hidden_layernorm"))
    ),
    "rotary base": Variant(EAGLE, llama_config(**THETA), formula={"shape": Shape(theta=500000.0)}),
    "the user's rotary base": Variant(
        EAGLE, llama_config(**THETA), formula={"shape": Shape(theta=100.0)}, options={"rope_theta": 100.0}
    ),
    "linear scaling": Variant(
        EAGLE,
        llama_config(rope_scaling={"type": "linear", "factor": 4.0}),
        formula={"shape": Shape(linear=4.0)},
    ),
    "epsilon": Variant(HASS, llama_config(rms_norm_eps=0.5), formula={"shape": Shape(eps=0.5)}),
    "own embedding": Variant(EAGLE | FIRST_EMBEDDING),
    "prefixed names": Variant(
        EAGLE,
        stored=renamed(EAGLE, lambda name: f"model.{name}") | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)},
    ),
    "speculators library": Variant(
        LIBRARY,
        library_config(speculators_model_type="eagle", layernorms=True, fusion_bias=True),
        renamed(LIBRARY, lambda name: LIBRARY_NAMES.get(name, name.replace("layers.0.", "transformer."))),
    ),
}
PLAIN = eagle3_tensors()
BIASED = eagle3_tensors(biases=True)
OUTPUT_BIAS = {"midlayer.self_attn.o_proj.bias": torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))}
QWEN3, QWEN3_WIDE = (eagle3_tensors(head_norms=True, head_dim=size) for size in (32, 128))
STATE_NORMS = norms("fc_norm.0", "fc_norm.1", "fc_norm.2")
AUX_NORMS = dict(
    zip(("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), STATE_NORMS.values(), strict=True)
)
REDUCED, PADDED = eagle3_tensors(columns=len(IDS)), eagle3_tensors(columns=len(IDS) + 6)
WITHOUT_OUTPUT = eagle3_tensors(lm_head=False)
FIRST = {"d2t": torch.zeros(40, dtype=torch.int64)}
OWN_EMBEDDING, NARROW_EMBEDDING = (
    {"embed_tokens.weight": torch.randn(rows, width, generator=torch.Generator().manual_seed(2))}
    for rows, width in ((VOCABULARY + 8, HIDDEN), (VOCABULARY, 32))
)
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 6}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NESTED_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
BASE = Shape(theta=5e5)
EAGLE3_VARIANTS = {
    "original names": Variant(PLAIN),
    "bare names": Variant(PLAIN, stored=renamed(PLAIN, bare)),
    "prefixed names": Variant(PLAIN, stored=renamed(PLAIN, lambda name: f"model.{name}")),
    "prefixed bare names": Variant(PLAIN, stored=renamed(PLAIN, lambda name: f"model.{bare(name)}")),
    "attention biases": Variant(BIASED, llama_config(attention_bias=True)),
    "a bias after attention": Variant(BIASED | OUTPUT_BIAS, llama_config(attention_bias=True)),
    "Qwen3's norms of heads": Variant(
        QWEN3,
        llama_config(head_dim=32, model_type="qwen3", rope_theta=1e6),
        formula={"shape": Shape(theta=1e6)},
    ),
    "three layers": Variant(
        eagle3_tensors(layers=3),
        llama_config(num_hidden_layers=3),
        formula={"others": ["layers.1", "layers.2"]},
    ),
    "a layer that slides": Variant(PLAIN, llama_config(**SLIDING), formula={"shape": Shape(window=6)}),
    "a norm before fc": Variant(PLAIN | norms("input_norm", width=3 * HIDDEN)),
    "a norm of each state": Variant(PLAIN | STATE_NORMS),
    "a norm of each state by SGLang's names": Variant(PLAIN | STATE_NORMS, stored=PLAIN | AUX_NORMS),
    "four states": Variant(eagle3_tensors(states=4), llama_config(eagle_aux_hidden_state_layer_ids=[0, 3, 5, LAYERS])),
    "the final state alone": Variant(
        eagle3_tensors(fc=False), llama_config(eagle_config={"use_aux_hidden_state": False})
    ),
    "reduced vocabulary": Variant(REDUCED, llama_config(draft_vocab_size=len(IDS)), REDUCED | reduced(IDS)),
    "reduced vocabulary with padded rows": Variant(
        PADDED | {"lm_head.weight": PADDED["lm_head.weight"][: len(IDS)]}, stored=PADDED | reduced(IDS)
    ),
    "whole vocabulary with d2t": Variant(PLAIN, stored=PLAIN | {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}),
    "the target's first tokens": Variant(eagle3_tensors(columns=40), stored=eagle3_tensors(columns=40) | FIRST),
    "the target's output matrix": Variant(WITHOUT_OUTPUT),
    "the target's output matrix, reduced": Variant(
        WITHOUT_OUTPUT, stored=WITHOUT_OUTPUT | reduced(IDS), formula={"ids": IDS}
    ),
    "own padded embedding": Variant(PLAIN | OWN_EMBEDDING),
    "another width": Variant(eagle3_tensors(h=32) | NARROW_EMBEDDING, llama_config(h=32, target_hidden_size=HIDDEN)),
    "normed residual": Variant(PLAIN, llama_config(norm_before_residual=True), formula={"norm_before_residual": True}),
    "scaled logits": Variant(PLAIN, llama_config(logit_scale=0.25), formula={"logit_scale": 0.25}),
    "rotary base": Variant(PLAIN, llama_config(rope_theta=5e5), formula={"shape": BASE}),
    "nested rotary base": Variant(PLAIN, llama_config(**NESTED_THETA), formula={"shape": BASE}),
    "the user's rotary base": Variant(PLAIN, llama_config(rope_theta=5e5), options={"rope_theta": 1e4}),
    "the user's rotary base, nested": Variant(PLAIN, llama_config(**NESTED_THETA), options={"rope_theta": 1e4}),
    "Llama 3's rotary embedding": Variant(
        PLAIN,
        llama_config(rope_theta=5e5, rope_scaling=LLAMA3),
        formula={"shape": Shape(frequencies=llama3_frequencies())},
    ),
    "library": Variant(REDUCED, library_config(), renamed(REDUCED, bare) | reduced(IDS)),
    "library, normed residual": Variant(
        REDUCED,
        library_config(norm_before_residual=True),
        renamed(REDUCED, bare) | reduced(IDS),
        {"norm_before_residual": True},
    ),
    # transformers' default of a Llama is as many key heads as query heads. The library's own key defaults to true.
    "library, defaults omitted": Variant(
        as_many_keys_as_queries(),
        library_config(layer={"num_key_value_heads": None}, norm_before_residual=None),
        renamed(as_many_keys_as_queries(), bare),
        {"shape": Shape(kv_heads=HEADS), "norm_before_residual": True},
    ),
    "library, Qwen3's default head size": Variant(
        QWEN3_WIDE, library_config(layer={"model_type": "qwen3"}), renamed(QWEN3_WIDE, bare)
    ),
    "EAGLE-3.1": Variant(PLAIN, llama_config(norm_output=True), formula={"norm_output": True}),
    "EAGLE-3.1, denied by the user": Variant(PLAIN, llama_config(norm_output=True), options={"norm_output": False}),
    "library, EAGLE-3.1": Variant(PLAIN, library_config(norm_output=True), renamed(PLAIN, bare), {"norm_output": True}),
}
KINDS = {
    "eagle": (eagle.matches, eagle.EagleNetwork, Eagle1),
    "eagle3": (eagle3.matches, eagle3.Eagle3Network, Eagle3),
}
VARIANTS = {f"eagle, {name}": variant for name, variant in EAGLE_VARIANTS.items()} | {
    f"eagle3, {name}": variant for name, variant in EAGLE3_VARIANTS.items()
}
VOCABULARIES = {
    "eagle3, reduced vocabulary": IDS,
    "eagle3, whole vocabulary with d2t": None,
    "eagle3, original names": None,
    "eagle3, the target's first tokens": list(range(40)),
}


def check(name: str, folder: Path, target: TargetWeights, **tolerance: float) -> Any:
    matches, network, formula = KINDS[name.split(",")[0]]
    variant = VARIANTS[name]
    checkpoint = Checkpoint(save_head(folder, variant.stored or variant.tensors, variant.config))
    assert matches(checkpoint)
    head: Any = network(checkpoint, target, 256, **variant.options)
    compare(head, formula(variant.tensors, *MATRICES, **variant.formula), **tolerance)
    return head


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_the_formula(name: str, target: TargetWeights, tmp_path: Path) -> None:
    head = check(name, tmp_path, target)
    if name in VOCABULARIES:
        assert (None if head.ids is None else head.ids.tolist()) == VOCABULARIES[name]
    if name == "eagle3, the final state alone":
        assert head.description.hidden_state_layers == (LAYERS + 1,)


@pytest.mark.parametrize("name", ["eagle, a bias that is not configured", "eagle3, original names"])
def test_a_head_runs_in_the_targets_dtype(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, target_weights(torch.bfloat16), tolerance=0.05)


def test_the_heads_own_limit_of_positions_does_not_count(target: TargetWeights, tmp_path: Path) -> None:
    """Configurations name 2048 positions, and the heads work far beyond."""
    save_head(tmp_path, PLAIN, llama_config(max_position_embeddings=16))
    assert eagle3.Eagle3Network(Checkpoint(tmp_path), target, 256).description.position_limit == 512


BOTH = "eagle_aux_hidden_state_layer_ids"


class TestLayers:
    """The target's states that a head reads: `n` is the output of layer n, 0 the embedding."""

    @pytest.mark.parametrize(
        ("keys", "users", "layers"),
        [
            ({}, None, (2, 4, 5)),
            ({"eagle_config": {BOTH: [1, 3, 4]}}, None, (2, 4, 5)),
            ({BOTH: [1, 3, 4]}, None, (1, 3, 4)),
            ({BOTH: [6, 1, 3, 1]}, None, (1, 3, 6)),
            ({"eagle_config": {"layer_ids": [1, 3, 4]}}, None, (1, 3, 4)),
            ({"eagle_config": {BOTH: [0, 3, 7]}}, None, (1, 4, 8)),
            ({BOTH: [1, 3, 4], "eagle_config": {BOTH: [1, 3, 4]}}, None, (2, 4, 5)),
            ({BOTH: [1, 3, 4]}, [0, 3, 7], (0, 3, 7)),
        ],
        ids=["default", "SGLang's", "vLLM's", "any order", "vLLM's, nested", "to the last", "both", "the user's"],
    )
    def test_they_are_configured(
        self,
        keys: dict[str, Any],
        users: list[int] | None,
        layers: tuple[int, ...],
        target: TargetWeights,
        tmp_path: Path,
    ) -> None:
        checkpoint = Checkpoint(save_head(tmp_path, PLAIN, llama_config(**keys)))
        assert eagle3.Eagle3Network(checkpoint, target, 256, layers=users).description.hidden_state_layers == layers

    @torch.no_grad()
    def test_the_target_gives_what_enters_the_next_layer(self) -> None:
        """Layer ids index transformers' `hidden_states`. The last is the normed state, one layer more."""
        tokens, layers = [3, 1, 4, 1, 5], (2, 4, 5, LAYERS + 1)
        whole = TARGET(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        slots = SlotTable()
        slots.slots = [1, 2, 3, 4, 5]
        states = target_model().run([slots.row(token, i) for i, token in enumerate(tokens)], [0], layers).hidden
        assert states is not None
        for i, n in enumerate((2, 4, 5, LAYERS)):
            torch.testing.assert_close(states[:, i], whole[n][0], rtol=1e-4, atol=1e-4)


def refused(kind: str, folder: Path, target: TargetWeights, complaint: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        KINDS[kind][1](Checkpoint(folder), target, 256, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "keys", "complaint"),
    [
        ("eagle", {"hidden_size": 128}, "is a head for hidden size 128, target has 64: choose one for it"),
        ("eagle", {"intermediate_size": 100}, "layers.0.mlp.gate_proj.weight in .* shape .96, 64. where .100, 64."),
        ("eagle", {"hidden_size": None}, "names no hidden_size"),
        ("eagle", {"hidden_size": "wide"}, "describes no decoder: .*hidden_size"),
        ("eagle", {"num_attention_heads": 0}, "describes no decoder: "),
        ("eagle", {"num_attention_heads": 3}, "describes no decoder: .*64.*number of attention heads"),
        ("eagle", {"rope_scaling": {"type": "mystery"}}, "'mystery'"),
        ("eagle", {"rope_scaling": {"type": "yarn"}}, "describes no decoder: .*factor"),
        ("eagle", {"hidden_act": "gelu"}, "'gelu'"),
        ("eagle", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5"),
        ("eagle3", {"rope_parameters": HALF_ROTATED}, "has partial_rotary_factor 0.5"),
        ("eagle3", {"norm_before_fc": True}, "has norm_before_fc and no tensor of such a norm"),
        ("eagle3", {"fc_norm": True}, "has fc_norm and no tensor of such a norm"),
        ("eagle3", {"hidden_size": 128}, "is a head for hidden size 128, target has 64: choose one for it"),
        ("eagle3", {"target_hidden_size": 4096}, "is a head for hidden size 4096, target has 64: choose one for it"),
        ("eagle3", {BOTH: [2, 16, 29]}, r"needs the states of layers \[2, 16, 29\], target has 8"),
        ("eagle3", {BOTH: [1, 2]}, r"fc.weight in .* has shape \[64, 192\] where \[64, 128\]"),
        ("eagle3", {BOTH: ["two"]}, BOTH),
        ("eagle3", {"eagle_config": [1, 2]}, "eagle_config"),
        ("eagle3", {"num_hidden_layers": 2}, "has no tensor layers.1.self_attn.q_proj.weight"),
        # Layers of these families have the names of a Llama's, and compute other things.
        *(
            ("eagle3", {"model_type": name}, f"layers of type '{name}'")
            for name in ("llama4", "llama4_text", "cohere", "minicpm")
        ),
    ],
)
def test_an_unsuitable_configuration_is_refused(
    kind: str, keys: dict[str, Any], complaint: str, target: TargetWeights, tmp_path: Path
) -> None:
    tensors = EAGLE if kind == "eagle" else PLAIN
    refused(kind, save_head(tmp_path, tensors, changed(llama_config(), **keys)), target, complaint)


def test_a_head_without_a_configuration_is_refused(target: TargetWeights, tmp_path: Path) -> None:
    refused("eagle", save_head(tmp_path, EAGLE, None), target, "has no config.json")


def test_layers_that_the_target_lacks_are_refused(target: TargetWeights, tmp_path: Path) -> None:
    save_head(tmp_path, PLAIN, llama_config())
    refused("eagle3", tmp_path, target, r"needs the states of layers \[1, 2, 12\]", layers=[1, 2, 12])
    shallow = target_weights()
    shallow.config.num_hidden_layers = 2
    refused("eagle3", tmp_path, shallow, r"layers \[2, 1, -1\], target has 2")


LAYER = "layers.0.self_attn"
TEN = eagle3_tensors(columns=10)
NARROW = eagle3_tensors(h=32) | {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}
MLA_NAMES = renamed(PLAIN, lambda name: name.replace("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa"))
"""DeepSeek's and Kimi's heads."""


@pytest.mark.parametrize(
    ("kind", "tensors", "complaint"),
    [
        (
            "eagle",
            without(EAGLE, "layers.0.post_attention_layernorm.weight"),
            "has no tensor layers.0.post_attention_layernorm.weight: it is incomplete",
        ),
        (
            "eagle",
            without(eagle_tensors(qkv_bias=True), f"{LAYER}.k_proj.bias"),
            f"has no tensor {LAYER}.k_proj.bias",
        ),
        (
            "eagle",
            EAGLE | {"layers.0.mlp.gate_proj.bias": torch.zeros(96)},
            "layers.0.mlp.gate_proj.bias, which is no part of the EAGLE heads",
        ),
        (
            "eagle",
            EAGLE | {"embed_tokens.weight": torch.zeros(VOCABULARY + 1000, HIDDEN)},
            r"embed_tokens.weight in .* has shape \[1096, 64\] where \[96, 64\] is needed.*vocabulary 96",
        ),
        ("eagle3", eagle3_tensors(columns=50), "guesses 50 tokens and has no d2t to say which"),
        ("eagle3", eagle3_tensors(columns=VOCABULARY + 1000), "guesses 1096 tokens and has no d2t"),
        *(
            ("eagle3", TEN | {"d2t": ids}, f"d2t in .* does not name {len(ids)} different tokens")
            for ids in (
                torch.arange(10) * 20,
                -torch.arange(10),
                torch.full((10,), -1),
                torch.zeros(0, dtype=torch.int64),
            )
        ),
        ("eagle3", TEN | reduced(IDS) | {"d2t": torch.arange(1, 11)}, "d2t and t2d in .* name different tokens"),
        ("eagle3", eagle3_tensors(columns=7) | reduced(IDS), "guesses 7 tokens, and d2t names 10"),
        *(
            ("eagle3", without(PLAIN, f"{name}.weight"), f"has no tensor {bare(name)}.weight: it is incomplete")
            for name in ("fc", "norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
        ),
        ("eagle3", PLAIN | norms("fc_norm.0", "fc_norm.2"), "has no tensor fc_norm.1.weight"),
        ("eagle3", PLAIN | {"fc.bias": torch.zeros(HIDDEN)}, "has fc.bias, which is no part of the EAGLE-3 heads"),
        ("eagle3", MLA_NAMES, "multi-head latent attention"),
    ],
)
def test_unsuitable_tensors_are_refused(
    kind: str, tensors: dict[str, Tensor], complaint: str, target: TargetWeights, tmp_path: Path
) -> None:
    refused(kind, save_head(tmp_path, tensors, llama_config()), target, complaint)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_head_of_another_width_needs_matrices_of_its_own(name: str, target: TargetWeights, tmp_path: Path) -> None:
    config = llama_config(h=32, target_hidden_size=HIDDEN)
    refused("eagle3", save_head(tmp_path, without(NARROW, name), config), target, f"has no tensor {name}")
