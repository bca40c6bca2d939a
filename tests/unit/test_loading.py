"""Loading a checkpoint, and the errors for broken and unsupported ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator as build_speculator
from paceline.model import Model, SlotTable, load
from paceline.model.model import TransformersModel
from paceline.model.target_weights import TargetWeights
from paceline.model_names import ModelNotFoundError
from tests.helpers.checkpoints import save_checkpoint, save_tokenizer
from tests.helpers.llamas import POSITIONS, VOCABULARY, peaked_llama

CONFIG = EngineConfig(slots=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), eos_token_ids=[5, 7])


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def no_target_weights() -> TargetWeights:
    raise AssertionError("this method needs no target weights")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def assert_equal_logits(model: Model, network: torch.nn.Module, tokens: list[int]) -> None:
    table = SlotTable(range(model.slots, model.slots - len(tokens), -1))
    rows = [table.row(token, i) for i, token in enumerate(tokens)]
    ours = model.run(rows, range(len(tokens))).logits
    with torch.inference_mode():
        theirs = network(input_ids=torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_loaded_model_equals_transformers(checkpoint: Path) -> None:
    model = load(str(checkpoint), CONFIG)
    assert (model.vocabulary_size, model.max_model_len, model.slots) == (VOCABULARY, POSITIONS, 512)
    assert model.eos_token_ids == (5, 7)
    assert model.rows_invariant
    assert_equal_logits(model, peaked_llama(), [3, 1, 4, 1, 5])


def test_dtype_and_length_are_configured(checkpoint: Path) -> None:
    model = load(str(checkpoint), EngineConfig(slots=256, dtype="bfloat16", max_model_len=100))
    assert isinstance(model, TransformersModel)
    assert model.dtype is torch.bfloat16
    assert model.max_model_len == 100


def test_eos_tokens_may_be_in_the_model_s_configuration(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    change_config(copy, eos_token_id=9)
    assert load(str(copy), CONFIG).eos_token_ids == (9,)


def test_equal_vocabularies_have_equal_fingerprints(checkpoint: Path, copy: Path) -> None:
    assert load(str(checkpoint), CONFIG).fingerprint == load(str(copy), CONFIG).fingerprint
    save_tokenizer(copy, range(VOCABULARY - 1, -1, -1))
    assert load(str(checkpoint), CONFIG).fingerprint != load(str(copy), CONFIG).fingerprint


def test_mimo_needs_no_code_from_its_folder(copy: Path) -> None:
    """MiMo's checkpoints name classes of their own, which compute the same as Qwen2."""
    change_config(
        copy, model_type="mimo", architectures=["MiMoForCausalLM"], auto_map={"AutoConfig": "nowhere.MiMoConfig"}
    )
    products = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkv"]
    change_weights(copy, lambda w: w | {f"{name}.bias": torch.zeros(len(w[f"{name}.weight"])) for name in products})
    assert_equal_logits(load(str(copy), CONFIG), peaked_llama(), [3])


def test_a_table_needs_no_folder() -> None:
    assert load("table:64", CONFIG).vocabulary_size == 64


def test_a_missing_model_or_tokenizer(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model at .*nowhere: .*hf download"):
        load(str(tmp_path / "nowhere"), CONFIG)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json: save the model's tokenizer there"):
        load(str(copy), CONFIG)


MTP_TENSOR = "model.layers.2.mlp.up_proj.weight"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"
UP = "model.layers.1.mlp.up_proj.weight"
RECURRENT = "has layers of the kind linear_attention: choose a model with full or slid"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        r"cannot be loaded: .*metadata",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"cannot be loaded: .*no file named model.safetensors",
    ),
    "broken configuration": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"cannot be loaded: .*not a valid JSON",
    ),
    "unknown architecture": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "abacus"}'),
        r"cannot be loaded: .*`abacus`",
    ),
    # transformers fills missing weights with noise and only logs it.
    "missing weight": (
        lambda folder: change_weights(folder, lambda w: {name: w[name] for name in w if name != UP}),
        rf"lacks weights \({UP}, ...\): download it again",
    ),
    # Scales of a quantised checkpoint; transformers ignores them and only logs it.
    "unknown weight": (
        lambda folder: change_weights(folder, lambda w: w | {SCALE: torch.ones(1)}),
        rf"has weights that LlamaForCausalLM does not have \({SCALE}\)",
    ),
    "a layer after the last": (
        lambda folder: change_weights(folder, lambda w: w | {MTP_TENSOR: torch.ones(1)}),
        rf"does not have \({MTP_TENSOR}",
    ),
    # A draft head can be loaded from these, but the target is refused.
    **{
        kind: (
            lambda folder, kind=kind: change_config(folder, model_type=kind, num_experts=2, layer_types=None),
            RECURRENT,
        )
        for kind in ("qwen3_next", "qwen3_5_text")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_or_unsupported_checkpoint_is_refused_with_a_reason(fault: str, copy: Path) -> None:
    damage, message = FAULTS[fault]
    damage(copy)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(copy), CONFIG)
    assert str(copy) in str(caught.value)


def test_a_model_with_a_state_is_refused_before_its_weights_are_read(copy: Path) -> None:
    change_config(copy, model_type="qwen3_next", layer_types=["linear_attention", "full_attention"])
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=RECURRENT):
        load(str(copy), CONFIG)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("model.layers.1.self_attn.k_scale", {}),
        (MTP_TENSOR, {"num_nextn_predict_layers": 1}),
    ],
)
def test_weights_that_change_nothing_are_ignored(copy: Path, name: str, settings: dict[str, int]) -> None:
    change_weights(copy, lambda w: w | {name: torch.ones(1)})
    change_config(copy, **settings)
    assert load(str(copy), CONFIG).rows_invariant


def test_float16_is_converted_on_a_cpu(copy: Path) -> None:
    change_weights(copy, lambda w: {name: weight.half() for name, weight in w.items()})
    change_config(copy, dtype="float16")
    model = load(str(copy), CONFIG)
    assert isinstance(model, TransformersModel)
    expected = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    assert model.dtype is expected
    with pytest.raises(ValueError, match="float16 takes a GPU: set dtype to bfloat16 or float32"):
        load(str(copy), EngineConfig(slots=512, dtype="float16"))


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TOWERS: dict[str, dict[str, object]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 16},
        "vision_config": {**VISION, "image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 1,
        "image_token_index": 5,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "head_dim": 16, "image_size": 16, "patch_size": 8},
        "image_token_index": 5,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64, "depth": 1, "num_heads": 2,
            "intermediate_size": 32, "deepstack_visual_indexes": [0]},
        "image_token_id": 5,
    },
}  # fmt: skip
"""Small multimodal models by kind."""


@pytest.mark.parametrize("kind", TOWERS)
def test_only_the_text_model_of_a_multimodal_checkpoint_is_loaded(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **TOWERS[kind])
    network = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(VOCABULARY))
    assert_equal_logits(load(str(tmp_path), CONFIG), network, [(11 * i + 7) % VOCABULARY for i in range(40)])


def test_an_architecture_with_its_own_attention_is_refused_with_one_sentence(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "xglm", vocab_size=VOCABULARY, d_model=64, num_layers=2, attention_heads=4, ffn_dim=96
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(VOCABULARY))
    with pytest.raises(
        ValueError, match="is a XGLMForCausalLM, which cannot be run here: its 2 layers attend 0 times"
    ) as caught:
        load(str(tmp_path), CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "abacus"}, "device 'abacus' cannot be used here, choose another"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here, choose another"),
        ({"max_model_len": 513}, r"max_model_len 513 exceeds the 512 positions of .*: lower it"),
    ],
)
def test_a_configuration_that_the_machine_or_the_model_lacks(
    checkpoint: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(str(checkpoint), EngineConfig.model_validate(settings))


def test_a_draft_may_have_fewer_positions_than_its_target(checkpoint: Path) -> None:
    """max_model_len is the target's; the draft guesses as far as it can."""
    config = SpeculativeConfig(method="draft_model", model=str(checkpoint))
    draft = build_speculator(config, EngineConfig(slots=256, max_model_len=100_000), no_target_weights)
    assert draft.position_limit == POSITIONS
    assert draft.vocabulary_size == VOCABULARY


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpeculativeConfig(), "method 'none' drafts nothing"),
        (SpeculativeConfig(method="custom_class", speculator="nowhere.at.all"), "'nowhere.at.all' cannot be imported"),
        (SpeculativeConfig(method="custom_class", speculator="all"), "'all' cannot be imported"),
        (SpeculativeConfig(method="custom_class", speculator="builtins.zip"), "made a zip, which is no Speculator"),
    ],
)
def test_a_speculator_that_cannot_be_built(config: SpeculativeConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_speculator(config, CONFIG, no_target_weights)
