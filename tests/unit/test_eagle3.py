"""EAGLE-3 heads: every published variant computes the authors' formula; unsuitable checkpoints are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods.eagle3 import Eagle3Network, matches
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.rows import SlotTable
from paceline.model.target_weights import TargetWeights
from tests.helpers import head_formulas as formulas
from tests.helpers.head_checkpoints import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    eagle3_tensors,
    llama_config,
    random,
    reduced,
    renamed,
    save_head,
    target_model,
    target_network,
    target_weights,
)
from tests.helpers.head_formulas import Shape
from tests.helpers.head_rounds import compare

IDS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
"""The target's tokens in a reduced vocabulary."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


@dataclass(frozen=True)
class Variant:
    """`tensors` by the original's names. `stored`: as the file has them, if it differs. `formula`: its options."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any] = field(default_factory=llama_config)
    stored: Mapping[str, Tensor] | None = None
    formula: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def check(folder: Path, target: TargetWeights, variant: Variant, **tolerance: float) -> Eagle3Network:
    head = loaded(save_head(folder, variant.stored or variant.tensors, variant.config), target, **variant.options)
    matrices = target_network()
    formula = formulas.Eagle3(
        variant.tensors, matrices.model.embed_tokens.weight, matrices.lm_head.weight, **variant.formula
    )
    compare(head, formula, **tolerance)
    return head


def loaded(folder: Path, target: TargetWeights, **options: Any) -> Eagle3Network:
    checkpoint = Checkpoint(folder)
    assert matches(checkpoint)
    return Eagle3Network(checkpoint, target, 256, **options)


def norms(*names: str, width: int = HIDDEN) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(19)
    return {f"{name}.weight": random(generator, width) for name in names}


def bare(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def library_config(**keys: Any) -> dict[str, Any]:
    """The speculators library's configuration, which omits transformers' defaults. A key that is None is left out."""
    layer = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    layer |= {"num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "model_type": "llama"} | keys.pop("layer", {})
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "transformer_layer_config": {key: value for key, value in layer.items() if value is not None},
        "draft_vocab_size": VOCABULARY,
        "norm_before_residual": False,
    }
    return {key: value for key, value in (config | keys).items() if value is not None}


def llama3_frequencies() -> Tensor:
    """Long waves are slowed down by `factor`, short ones not at all, those between in part."""
    frequencies = 5e5 ** -(torch.arange(8) / 8)
    turns = 64 * frequencies / (2 * math.pi)
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return frequencies * (share + (1 - share) / 8.0)


def as_many_keys_as_queries() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(23)
    return PLAIN | {f"midlayer.self_attn.{x}_proj.weight": random(generator, 64, 128) for x in ("k", "v")}


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
NESTED_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
BASE = Shape(theta=5e5)
VARIANTS = {
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
VOCABULARIES = {
    "reduced vocabulary": IDS,
    "whole vocabulary with d2t": None,
    "original names": None,
    "the target's first tokens": list(range(40)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_the_formula(name: str, target: TargetWeights, tmp_path: Path) -> None:
    head = check(tmp_path, target, VARIANTS[name])
    if name in VOCABULARIES:
        assert (None if head.ids is None else head.ids.tolist()) == VOCABULARIES[name]
    if name == "the final state alone":
        assert head.hidden_state_layers == (LAYERS + 1,)


def test_a_head_runs_in_the_targets_dtype(tmp_path: Path) -> None:
    check(tmp_path, target_weights(torch.bfloat16), VARIANTS["original names"], tolerance=0.05)


class TestLayers:
    """The target's states that a head reads: `n` is the output of layer n, 0 the embedding."""

    @pytest.mark.parametrize(
        ("keys", "layers"),
        [
            ({}, (2, 4, 5)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
            ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
            ({"eagle_aux_hidden_state_layer_ids": [6, 1, 3, 1]}, (1, 3, 6)),
            ({"eagle_config": {"layer_ids": [1, 3, 4]}}, (1, 3, 4)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, 8)),
            (
                {
                    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
                    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
                },
                (2, 4, 5),
            ),
        ],
        ids=["default", "SGLang's", "vLLM's", "in any order", "vLLM's, nested", "to the last", "both"],
    )
    def test_by_configuration(
        self, keys: dict[str, Any], layers: tuple[int, ...], target: TargetWeights, tmp_path: Path
    ) -> None:
        assert loaded(save_head(tmp_path, PLAIN, llama_config(**keys)), target).hidden_state_layers == layers

    def test_the_user_overrides_the_configuration(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, PLAIN, llama_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
        assert loaded(tmp_path, target, layers=[0, 3, 7]).hidden_state_layers == (0, 3, 7)

    @torch.no_grad()
    def test_the_target_gives_what_enters_the_next_layer(self, tmp_path: Path) -> None:
        """Layer ids index transformers' `hidden_states`, except its last entry: states are taken before any norm."""
        network = target_network()
        model = target_model(network)
        tokens = [3, 1, 4, 1, 5]
        whole = target_network()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        slots = SlotTable()
        slots.slots = [1, 2, 3, 4, 5]
        layers = loaded(save_head(tmp_path, PLAIN, llama_config()), target_weights()).hidden_state_layers
        rows = [slots.row(token, i) for i, token in enumerate(tokens)]
        states = model.run(rows, [0], [*layers, model.target_weights().final_layer]).hidden
        assert states is not None
        for i, n in enumerate((2, 4, 5, LAYERS)):
            torch.testing.assert_close(states[:, i], whole[n][0], rtol=1e-4, atol=1e-4)


def without(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != f"{name}.weight"}


NARROW = eagle3_tensors(h=32) | {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}


class TestRefusals:
    """One sentence that says what is wrong with which file."""

    @pytest.mark.parametrize(
        ("keys", "complaint"),
        [
            ({"hidden_size": 128}, "is a head for hidden size 128, target has 64: choose one for it"),
            ({"target_hidden_size": 4096}, "is a head for hidden size 4096, target has 64: choose one for it"),
            (
                {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
                r"needs the states of layers \[2, 16, 29\], target has 8",
            ),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight in .* has shape \[64, 192\] where \[64, 128\]"),
            ({"eagle_aux_hidden_state_layer_ids": ["two"]}, "eagle_aux_hidden_state_layer_ids"),
            ({"eagle_config": [1, 2]}, "eagle_config"),
            ({"num_hidden_layers": 2}, "has no tensor layers.1.self_attn.q_proj.weight"),
            # Layers of these families have the names of a Llama's, and compute other things.
            *(
                ({"model_type": name}, f"layers of type '{name}'")
                for name in ("llama4", "llama4_text", "cohere", "minicpm")
            ),
        ],
    )
    def test_an_unsuitable_configuration(
        self, keys: dict[str, Any], complaint: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        self.refused(save_head(tmp_path, PLAIN, llama_config() | keys), target, complaint)

    def test_layers_that_the_target_lacks(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, PLAIN, llama_config())
        self.refused(tmp_path, target, r"needs the states of layers \[1, 2, 12\]", layers=[1, 2, 12])
        shallow = target_weights()
        shallow.config.num_hidden_layers = 2
        self.refused(tmp_path, shallow, r"layers \[2, 1, -1\], target has 2")

    @pytest.mark.parametrize(
        ("stored", "complaint"),
        [
            (eagle3_tensors(columns=50), "guesses 50 tokens and has no d2t to say which"),
            (eagle3_tensors(columns=VOCABULARY + 1000), "guesses 1096 tokens and has no d2t"),
            (
                eagle3_tensors(columns=10) | {"d2t": torch.arange(10) * 20},
                "d2t in .* does not name 10 different tokens",
            ),
            (eagle3_tensors(columns=10) | {"d2t": -torch.arange(10)}, "d2t in .* does not name 10 different tokens"),
            (eagle3_tensors(columns=10) | {"d2t": torch.full((10,), -1)}, "d2t in .* does not name 10 different"),
            (eagle3_tensors(columns=10) | {"d2t": torch.zeros(0, dtype=torch.int64)}, "d2t in .* does not name 0"),
            (
                eagle3_tensors(columns=10) | reduced(IDS) | {"d2t": torch.arange(1, 11)},
                "d2t and t2d in .* name different tokens",
            ),
            (eagle3_tensors(columns=7) | reduced(IDS), "guesses 7 tokens, and d2t names 10"),
            *(
                (without(PLAIN, name), f"has no tensor {bare(name)}.weight: it is incomplete")
                for name in ("fc", "norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
            ),
            (PLAIN | norms("fc_norm.0", "fc_norm.2"), "has no tensor fc_norm.1.weight"),
            (
                PLAIN | {"fc.bias": torch.zeros(HIDDEN)},
                "has fc.bias, which is no part of the EAGLE-3 heads that can be run",
            ),
            # DeepSeek's and Kimi's heads
            (
                renamed(PLAIN, lambda name: name.replace("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa")),
                "multi-head latent attention",
            ),
        ],
    )
    def test_unsuitable_tensors(
        self, stored: dict[str, Tensor], complaint: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        self.refused(save_head(tmp_path, stored, llama_config()), target, complaint)

    @pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
    def test_another_width_without_matrices_of_its_own(self, name: str, target: TargetWeights, tmp_path: Path) -> None:
        config = llama_config(h=32, target_hidden_size=HIDDEN)
        self.refused(save_head(tmp_path, without(NARROW, name), config), target, f"has no tensor {name}")

    def refused(self, folder: Path, target: TargetWeights, complaint: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=complaint) as caught:
            Eagle3Network(Checkpoint(folder), target, 256, **options)
        assert "\n" not in str(caught.value)
