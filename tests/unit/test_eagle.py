"""EAGLE-1 and -2 heads: every published variant computes what its formula says, and what is none is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods.eagle import EagleNetwork, is_eagle
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle_tensors,
    lent,
    llama_config,
    renamed,
    save_bin,
    save_head,
    target_network,
)
from tests.helpers.head_formulas import Eagle1, Shape
from tests.helpers.head_rounds import compare


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return lent()


def formula(tensors: dict[str, Tensor], **shape: Any) -> Eagle1:
    network = target_network()
    return Eagle1(tensors, network.model.embed_tokens.weight, network.lm_head.weight, Shape(**shape))


def loaded(folder: Path, target: TargetWeights, **options: Any) -> EagleNetwork:
    checkpoint = Checkpoint(folder)
    assert is_eagle(checkpoint)
    return EagleNetwork(checkpoint, target, 256, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {"bias": False}),
        ({"bias": True}, {}),
        ({"bias": True}, {"bias": False}),
        ({"qkv_bias": True}, {"qkv_bias": True}),
        ({"norms": True}, {}),
    ],
    ids=["no bias", "a bias nobody mentions", "a bias that is denied", "Qwen2's biases", "HASS's norms"],
)
def test_a_head_computes_what_its_tensors_say(
    options: dict[str, bool], said: dict[str, Any], target: TargetWeights, tmp_path: Path
) -> None:
    tensors = eagle_tensors(**options)
    compare(loaded(save_head(tmp_path, tensors, llama_config(**said)), target), formula(tensors))


def test_the_rotary_base_is_the_heads_own_or_what_the_user_says(target: TargetWeights, tmp_path: Path) -> None:
    tensors = eagle_tensors()
    save_head(tmp_path, tensors, llama_config(rope_theta=500000.0))
    compare(loaded(tmp_path, target), formula(tensors, theta=500000.0))
    compare(loaded(tmp_path, target, rope_theta=100.0), formula(tensors, theta=100.0))


def test_old_linear_scaling(target: TargetWeights, tmp_path: Path) -> None:
    tensors = eagle_tensors()
    save_head(tmp_path, tensors, llama_config(rope_scaling={"type": "linear", "factor": 4.0}))
    compare(loaded(tmp_path, target), formula(tensors, linear=4.0))


def test_the_norms_epsilon_is_the_configurations(target: TargetWeights, tmp_path: Path) -> None:
    tensors = eagle_tensors(norms=True)
    save_head(tmp_path, tensors, llama_config(rms_norm_eps=0.5))
    compare(loaded(tmp_path, target), formula(tensors, eps=0.5))


def test_an_embedding_of_its_own_is_used(target: TargetWeights, tmp_path: Path) -> None:
    own = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    tensors = eagle_tensors() | {"embed_tokens.weight": own}
    compare(loaded(save_head(tmp_path, tensors, llama_config()), target), formula(tensors))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before torch 1.6"])
def test_torchs_own_format(options: dict[str, Any], target: TargetWeights, tmp_path: Path) -> None:
    """Many uploads have no other; some with what the training left beside it."""
    tensors = eagle_tensors(bias=True)
    save_bin(tmp_path, tensors, llama_config(), **options)
    torch.save({"args": Path("no tensor")}, tmp_path / "training_args.bin")
    torch.save({"state": {0: torch.zeros(1)}}, tmp_path / "optimizer.pt")
    compare(loaded(tmp_path, target), formula(tensors))


def test_names_with_a_prefix(target: TargetWeights, tmp_path: Path) -> None:
    tensors = eagle_tensors()
    stored = renamed(tensors, lambda name: f"model.{name}") | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}
    compare(loaded(save_head(tmp_path, stored, llama_config()), target), formula(tensors))


def test_the_speculators_librarys_first_format(target: TargetWeights, tmp_path: Path) -> None:
    names = {
        "fc.weight": "fusion_fc.weight",
        "fc.bias": "fusion_fc.bias",
        "embed_layernorm.weight": "embedding_layernorm.weight",
        "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
    }
    tensors = eagle_tensors(bias=True, norms=True)
    stored = renamed(tensors, lambda name: names.get(name, name.replace("layers.0.", "transformer.")))
    layer = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {
        "speculators_model_type": "eagle",
        "layernorms": True,
        "fusion_bias": True,
        "transformer_layer_config": layer | {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "model_type": "llama"},
    }
    compare(loaded(save_head(tmp_path, stored, config), target), formula(tensors))


def test_the_norm_before_attention_as_hass_calls_it(target: TargetWeights, tmp_path: Path) -> None:
    tensors = eagle_tensors(norms=True)
    stored = renamed(tensors, lambda name: name.replace("layers.0.input_layernorm", "hidden_layernorm"))
    compare(loaded(save_head(tmp_path, stored, llama_config()), target), formula(tensors))


def test_a_head_runs_in_the_targets_dtype(tmp_path: Path) -> None:
    tensors = eagle_tensors(bias=True)
    save_head(tmp_path, tensors, llama_config())
    compare(loaded(tmp_path, lent(torch.bfloat16)), formula(tensors), tolerance=0.05)


class TestRefusals:
    """One sentence that says what is wrong with which file."""

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"hidden_size": 128}, "is a head for hidden size 128, target has 64: choose one for it"),
            ({"intermediate_size": 100}, "layers.0.mlp.gate_proj.weight in .* has shape .96, 64. where .100, 64."),
            ({"hidden_size": None}, "names no hidden_size"),
            ({"hidden_size": "wide"}, "describes no decoder: .*hidden_size"),
            ({"num_attention_heads": 0}, "describes no decoder: "),
            ({"num_attention_heads": 3}, "describes no decoder: .*64.*number of attention heads"),
            ({"rope_scaling": {"type": "mystery"}}, "'mystery'"),
            ({"rope_scaling": {"type": "yarn"}}, "describes no decoder: .*factor"),
            ({"hidden_act": "gelu"}, "'gelu'"),
        ],
    )
    def test_a_configuration_that_does_not_suit(
        self, change: dict[str, Any], complaint: str, target: TargetWeights, tmp_path: Path
    ) -> None:
        said = {key: value for key, value in (llama_config() | change).items() if value is not None}
        self.refused(save_head(tmp_path, eagle_tensors(), said), target, complaint)

    def test_no_configuration(self, target: TargetWeights, tmp_path: Path) -> None:
        self.refused(save_head(tmp_path, eagle_tensors(), None), target, "has no config.json")

    @pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj.weight", "layers.0.post_attention_layernorm.weight"])
    def test_a_missing_tensor(self, name: str, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle_tensors()
        del tensors[name]
        self.refused(save_head(tmp_path, tensors, llama_config()), target, f"has no tensor {name}: it is incomplete")

    def test_one_of_three_biases_is_missing(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle_tensors(qkv_bias=True)
        del tensors["layers.0.self_attn.k_proj.bias"]
        complaint = "has no tensor layers.0.self_attn.k_proj.bias"
        self.refused(save_head(tmp_path, tensors, llama_config()), target, complaint)

    def test_a_tensor_that_nobody_knows(self, target: TargetWeights, tmp_path: Path) -> None:
        """Left out, it would make a head that guesses badly and never says why."""
        tensors = eagle_tensors() | {"layers.0.mlp.gate_proj.bias": torch.zeros(96)}
        complaint = "layers.0.mlp.gate_proj.bias, which is no part of the EAGLE heads"
        self.refused(save_head(tmp_path, tensors, llama_config()), target, complaint)

    def test_an_embedding_of_another_vocabulary(self, target: TargetWeights, tmp_path: Path) -> None:
        tensors = eagle_tensors() | {"embed_tokens.weight": torch.zeros(VOCABULARY + 1000, HIDDEN)}
        complaint = r"embed_tokens.weight in .* has shape \[1096, 64\] where \[96, 64\] is needed.*vocabulary 96"
        self.refused(save_head(tmp_path, tensors, llama_config()), target, complaint)

    @pytest.mark.parametrize("save", [save_head, save_bin])
    def test_a_truncated_file(self, save: Any, target: TargetWeights, tmp_path: Path) -> None:
        save(tmp_path, eagle_tensors(), llama_config())
        [weights] = [path for path in tmp_path.iterdir() if path.name != "config.json"]
        weights.write_bytes(weights.read_bytes()[:-1000])
        self.refused(tmp_path, target, f"{weights.name} cannot be read .*: download it again")

    def test_a_configuration_that_is_no_json(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, eagle_tensors(), llama_config())
        (tmp_path / "config.json").write_bytes(b'{"hidden_size": \xff')
        self.refused(tmp_path, target, "config.json is no JSON")

    def test_a_folder_without_weights(self, target: TargetWeights, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(llama_config()))
        self.refused(tmp_path, target, "holds no weights")

    def test_a_file_that_runs_code_when_read(self, target: TargetWeights, tmp_path: Path) -> None:
        save_head(tmp_path, eagle_tensors(), llama_config())
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Touch(tmp_path / "touched")}, 2))
        self.refused(tmp_path, target, "pytorch_model.bin cannot be read")
        assert not (tmp_path / "touched").exists()

    def refused(self, folder: Path, target: TargetWeights, complaint: str) -> None:
        with pytest.raises(CheckpointError, match=complaint) as caught:
            EagleNetwork(Checkpoint(folder), target, 256)
        assert "\n" not in str(caught.value)


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)
