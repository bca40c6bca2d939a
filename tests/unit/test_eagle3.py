"""EAGLE-3 heads: every published variant computes what its formula says, and what is none is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods.eagle3 import Eagle3Network, is_eagle3
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
    lent,
    llama_config,
    random,
    reduced,
    renamed,
    save_head,
    target_model,
    target_network,
)
from tests.helpers.head_formulas import Shape
from tests.helpers.head_rounds import compare

KNOWN = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
"""The target's tokens that a head of a reduced vocabulary guesses."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return lent()


def formula(tensors: dict[str, Tensor], **options: Any) -> formulas.Eagle3:
    network = target_network()
    return formulas.Eagle3(tensors, network.model.embed_tokens.weight, network.lm_head.weight, **options)


def loaded(folder: Path, target: TargetWeights, **options: Any) -> Eagle3Network:
    checkpoint = Checkpoint(folder)
    assert is_eagle3(checkpoint)
    return Eagle3Network(checkpoint, target, 256, **options)


def norms(*names: str, width: int = HIDDEN) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(19)
    return {f"{name}.weight": random(generator, width) for name in names}


def bare(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def of_the_library(**said: Any) -> dict[str, Any]:
    """The speculators library's configuration: what is transformers' default is left out of the layer's."""
    layer = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    layer |= {"num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "model_type": "llama"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "transformer_layer_config": layer | said.pop("layer", {}),
        "draft_vocab_size": VOCABULARY,
        "norm_before_residual": False,
    } | said


class TestTensors:
    def test_the_original_names(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        compare(loaded(save_head(tmp_path, tensors, llama_config()), target), formula(tensors))

    @pytest.mark.parametrize(
        "rename", [bare, lambda name: f"model.{name}", lambda name: f"model.{bare(name)}"], ids=[*"abc"]
    )
    def test_other_names(self, rename: Any, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        compare(loaded(save_head(tmp_path, renamed(tensors, rename), llama_config()), target), formula(tensors))

    def test_attention_biases(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(biases=True)
        compare(loaded(save_head(tmp_path, tensors, llama_config(attention_bias=True)), target), formula(tensors))

    def test_a_bias_after_attention(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(biases=True)
        tensors["midlayer.self_attn.o_proj.bias"] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
        compare(loaded(save_head(tmp_path, tensors, llama_config(attention_bias=True)), target), formula(tensors))

    def test_qwen3s_norms_of_heads(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(head_norms=True, head_dim=32)
        config = llama_config(head_dim=32, model_type="qwen3", rope_theta=1e6)
        shape = Shape(theta=1e6)
        compare(loaded(save_head(tmp_path, tensors, config), target), formula(tensors, shape=shape))

    def test_several_layers(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(layers=3)
        network = loaded(save_head(tmp_path, tensors, llama_config(num_hidden_layers=3)), target)
        compare(network, formula(tensors, others=["layers.1", "layers.2"]))

    def test_a_norm_before_fc(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors() | norms("input_norm", width=3 * HIDDEN)
        compare(loaded(save_head(tmp_path, tensors, llama_config()), target), formula(tensors))

    @pytest.mark.parametrize(
        "names", [["fc_norm.0", "fc_norm.1", "fc_norm.2"], ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]]
    )
    def test_a_norm_of_each_state(self, names: list[str], target: TargetWeights, tmp_path: Path) -> None:
        each = norms("fc_norm.0", "fc_norm.1", "fc_norm.2")
        stored = dict(zip((f"{name}.weight" for name in names), each.values(), strict=True))
        tensors = eagle3_tensors()
        network = loaded(save_head(tmp_path, tensors | stored, llama_config()), target)
        compare(network, formula(tensors | each))

    def test_one_state_more_than_usual(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(states=4)
        config = llama_config(eagle_aux_hidden_state_layer_ids=[0, 3, 5, LAYERS])
        compare(loaded(save_head(tmp_path, tensors, config), target), formula(tensors))

    def test_a_head_runs_in_the_targets_dtype(self, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        save_head(tmp_path, tensors, llama_config())
        compare(loaded(tmp_path, lent(torch.bfloat16)), formula(tensors), tolerance=0.05)


class TestVocabulary:
    def test_a_reduced_one(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(columns=len(KNOWN))
        config = llama_config(draft_vocab_size=len(KNOWN))
        network = loaded(save_head(tmp_path, tensors | reduced(KNOWN), config), target)
        assert network.ids is not None
        assert network.ids.tolist() == KNOWN
        compare(network, formula(tensors))

    def test_a_reduced_one_with_padded_rows(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(columns=len(KNOWN) + 6)
        network = loaded(save_head(tmp_path, tensors | reduced(KNOWN), llama_config()), target)
        compare(network, formula(tensors | {"lm_head.weight": tensors["lm_head.weight"][: len(KNOWN)]}))

    @pytest.mark.parametrize("more", [{}, {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}], ids=["none", "zeros"])
    def test_the_whole_one(self, more: dict[str, Tensor], target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        network = loaded(save_head(tmp_path, tensors | more, llama_config()), target)
        assert network.ids is None
        compare(network, formula(tensors))

    def test_the_first_tokens_of_the_target(self, target: TargetWeights, tmp_path: Path) -> None:
        """Offsets that are all 0 name tokens 0, 1, 2, ..."""
        tensors = eagle3_tensors(columns=40)
        stored = tensors | {"d2t": torch.zeros(40, dtype=torch.int64)}
        network = loaded(save_head(tmp_path, stored, llama_config()), target)
        assert network.ids is not None
        assert network.ids.tolist() == list(range(40))

    @pytest.mark.parametrize("ids", [None, KNOWN], ids=["whole", "reduced"])
    def test_the_targets_output_matrix_where_there_is_no_other(
        self, ids: list[int] | None, target: TargetWeights, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors(lm_head=False)
        stored = tensors | (reduced(ids) if ids else {})
        compare(loaded(save_head(tmp_path, stored, llama_config()), target), formula(tensors, ids=ids))

    def test_an_embedding_of_its_own(self, target: TargetWeights, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(2)
        own = torch.randn(VOCABULARY + 8, HIDDEN, generator=generator)  # with padding
        tensors = eagle3_tensors() | {"embed_tokens.weight": own}
        compare(loaded(save_head(tmp_path, tensors, llama_config()), target), formula(tensors))

    def test_a_head_of_another_width(self, target: TargetWeights, tmp_path: Path) -> None:
        own = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(2))
        tensors = eagle3_tensors(h=32) | {"embed_tokens.weight": own}
        network = loaded(save_head(tmp_path, tensors, llama_config(h=32, target_hidden_size=HIDDEN)), target)
        compare(network, formula(tensors))


class TestConfiguration:
    def test_the_residual_is_normed(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        config = llama_config(norm_before_residual=True)
        compare(loaded(save_head(tmp_path, tensors, config), target), formula(tensors, norm_before_residual=True))

    def test_logits_are_scaled(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        config = llama_config(logit_scale=0.25)
        compare(loaded(save_head(tmp_path, tensors, config), target), formula(tensors, logit_scale=0.25))

    def test_the_rotary_base(self, target: TargetWeights, tmp_path: Path) -> None:
        """10,000 whatever the target's is; the configuration's own; or what the user says instead."""
        tensors = eagle3_tensors()
        for theta in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
            save_head(tmp_path, tensors, llama_config(**theta))
            compare(loaded(tmp_path, target), formula(tensors, shape=Shape(theta=5e5)))
            compare(loaded(tmp_path, target, rope_theta=10000.0), formula(tensors))

    def test_llama_3s_rotary_embedding(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        save_head(tmp_path, tensors, llama_config(rope_theta=5e5, rope_scaling=LLAMA3))
        compare(loaded(tmp_path, target), formula(tensors, shape=Shape(frequencies=llama3_frequencies())))

    def test_without_states_of_several_layers(self, target: TargetWeights, tmp_path: Path) -> None:
        """The head is fed with what the target's final norm gives, and has no fc."""
        tensors = eagle3_tensors(fc=False)
        config = llama_config(eagle_config={"use_aux_hidden_state": False})
        network = loaded(save_head(tmp_path, tensors, config), target)
        assert network.hidden_state_layers == (LAYERS + 1,)
        compare(network, formula(tensors))

    @pytest.mark.parametrize("normed", [True, False])
    def test_the_speculators_librarys_format(self, normed: bool, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors(columns=len(KNOWN))
        stored = renamed(tensors, bare) | reduced(KNOWN)
        network = loaded(save_head(tmp_path, stored, of_the_library(norm_before_residual=normed)), target)
        compare(network, formula(tensors, norm_before_residual=normed))

    def test_what_the_library_leaves_out_is_transformers_default(self, target: TargetWeights, tmp_path: Path) -> None:
        """Of a Llama: as many heads of keys as of queries. Of what is in no default: the residual is normed."""
        config = of_the_library()
        del config["transformer_layer_config"]["num_key_value_heads"], config["norm_before_residual"]
        tensors = eagle3_tensors()
        generator = torch.Generator().manual_seed(23)
        tensors |= {f"midlayer.self_attn.{x}_proj.weight": random(generator, 64, 128) for x in ("k", "v")}
        network = loaded(save_head(tmp_path, renamed(tensors, bare), config), target)
        compare(network, formula(tensors, shape=Shape(kv_heads=HEADS), norm_before_residual=True))

    def test_the_librarys_qwen3_has_heads_of_128_unless_it_says_otherwise(
        self, target: TargetWeights, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors(head_norms=True, head_dim=128)
        config = of_the_library(layer={"model_type": "qwen3"})
        compare(loaded(save_head(tmp_path, renamed(tensors, bare), config), target), formula(tensors))

    @pytest.mark.parametrize("library", [True, False])
    def test_feeding_back_what_was_normed(self, library: bool, target: TargetWeights, tmp_path: Path) -> None:
        """EAGLE-3.1. What the user says counts more."""
        tensors = eagle3_tensors()
        config = of_the_library(norm_output=True) if library else llama_config(norm_output=True)
        stored = renamed(tensors, bare) if library else tensors
        folder = save_head(tmp_path, stored, config)
        compare(loaded(folder, target), formula(tensors, norm_output=True))
        compare(loaded(folder, target, norm_output=False), formula(tensors))


def llama3_frequencies() -> Tensor:
    """Long waves are slowed down by `factor`, short ones not at all, those between in part."""
    frequencies = 5e5 ** -(torch.arange(8) / 8)
    turns = 64 * frequencies / (2 * math.pi)
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return frequencies * (share + (1 - share) / 8.0)


class TestLayers:
    """Which of the target's states a head is fed with: `n` is the output of layer n, 0 the embedding."""

    @pytest.mark.parametrize(
        ("said", "layers"),
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
        self, said: dict[str, Any], layers: tuple[int, ...], target: TargetWeights, tmp_path: Path
    ) -> None:
        network = loaded(save_head(tmp_path, eagle3_tensors(), llama_config(**said)), target)
        assert network.hidden_state_layers == layers

    def test_the_user_knows_better(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, eagle3_tensors(), llama_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
        assert loaded(tmp_path, target, layers=[0, 3, 7]).hidden_state_layers == (0, 3, 7)

    @torch.no_grad()
    def test_the_target_gives_what_enters_the_next_layer(self, tmp_path: Path) -> None:
        """Layer ids mean transformers' `hidden_states`, before any norm; its last entry alone is another thing."""
        network = target_network()
        model = target_model(network)
        tokens = [3, 1, 4, 1, 5]
        whole = target_network()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        lane = SlotTable()
        lane.slots = [1, 2, 3, 4, 5]
        layers = loaded(save_head(tmp_path, eagle3_tensors(), llama_config()), lent()).hidden_state_layers
        rows = [lane.row(token, i) for i, token in enumerate(tokens)]
        got = model.run(rows, [0], [*layers, model.target_weights().final_layer]).hidden
        assert got is not None
        for i, n in enumerate((2, 4, 5, LAYERS)):
            torch.testing.assert_close(got[:, i], whole[n][0], rtol=1e-4, atol=1e-4)


class TestRefusals:
    """One sentence that says what is wrong with which file."""

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"hidden_size": 128}, "is a head for hidden size 128, target has 64: choose one for it"),
            ({"target_hidden_size": 4096}, "is a head for hidden size 4096, target has 64: choose one for it"),
            (
                {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
                r"wants the states of layers \[2, 16, 29\], target has 8",
            ),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight in .* has shape \[64, 192\] where \[64, 128\]"),
            ({"eagle_aux_hidden_state_layer_ids": ["two"]}, "eagle_aux_hidden_state_layer_ids"),
            ({"eagle_config": [1, 2]}, "eagle_config"),
            ({"num_hidden_layers": 2}, "has no tensor layers.1.self_attn.q_proj.weight"),
        ],
    )
    def test_a_configuration_that_does_not_suit(
        self, change: dict[str, Any], complaint: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        self.refused(save_head(tmp_path, eagle3_tensors(), llama_config() | change), target, complaint)

    def test_layers_that_the_user_names_and_the_target_lacks(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, eagle3_tensors(), llama_config())
        self.refused(tmp_path, target, r"wants the states of layers \[1, 2, 12\]", layers=[1, 2, 12])

    def test_a_target_with_too_few_layers_for_the_default(self, tmp_path: Path) -> None:
        shallow = lent()
        shallow.config.num_hidden_layers = 2
        self.refused(
            save_head(tmp_path, eagle3_tensors(), llama_config()), shallow, r"layers \[2, 1, -1\], target has 2"
        )

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
                eagle3_tensors(columns=10) | reduced(KNOWN) | {"d2t": torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])},
                "d2t and t2d in .* name different tokens",
            ),
            (eagle3_tensors(columns=7) | reduced(KNOWN), "guesses 7 tokens, and d2t names 10"),
        ],
        ids=["few", "foreign", "past the end", "not rising", "below 0", "none", "ids, not offsets", "rows missing"],
    )
    def test_a_vocabulary_that_does_not_suit(
        self, stored: dict[str, Tensor], complaint: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        self.refused(save_head(tmp_path, stored, llama_config()), target, complaint)

    @pytest.mark.parametrize("name", ["fc", "norm", "midlayer.hidden_norm", "midlayer.input_layernorm"])
    def test_a_missing_tensor(self, name: str, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        del tensors[f"{name}.weight"]
        complaint = f"has no tensor {bare(name)}.weight: it is incomplete"
        self.refused(save_head(tmp_path, tensors, llama_config()), target, complaint)

    def test_one_of_three_norms_is_missing(self, target: TargetWeights, tmp_path: Path) -> None:
        stored = eagle3_tensors() | norms("fc_norm.0", "fc_norm.2")
        self.refused(save_head(tmp_path, stored, llama_config()), target, "has no tensor fc_norm.1.weight")

    @pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
    def test_a_head_of_another_width_without_matrices_of_its_own(
        self, name: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors(h=32) | {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}
        del tensors[name]
        config = llama_config(h=32, target_hidden_size=HIDDEN)
        self.refused(save_head(tmp_path, tensors, config), target, f"has no tensor {name}")

    def test_a_tensor_that_nobody_knows(self, target: TargetWeights, tmp_path: Path) -> None:
        stored = eagle3_tensors() | {"fc.bias": torch.zeros(HIDDEN)}
        complaint = "has fc.bias, which is no part of the EAGLE-3 heads that can be run"
        self.refused(save_head(tmp_path, stored, llama_config()), target, complaint)

    def test_multi_head_latent_attention(self, target: TargetWeights, tmp_path: Path) -> None:
        """DeepSeek's and Kimi's heads."""
        stored = {
            name.replace("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa"): tensor
            for name, tensor in eagle3_tensors().items()
        }
        complaint = "multi-head latent attention"
        self.refused(save_head(tmp_path, stored, llama_config()), target, complaint)

    @pytest.mark.parametrize("model_type", ["llama4", "llama4_text", "cohere", "minicpm"])
    def test_other_families(self, model_type: str, target: TargetWeights, tmp_path: Path) -> None:
        """Their layers have the names of a Llama's, and compute other things."""
        config = llama_config(model_type=model_type)
        self.refused(save_head(tmp_path, eagle3_tensors(), config), target, f"layers of type '{model_type}'")

    def refused(self, folder: Path, target: TargetWeights, complaint: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=complaint) as caught:
            Eagle3Network(Checkpoint(folder), target, 256, **options)
        assert "\n" not in str(caught.value)
