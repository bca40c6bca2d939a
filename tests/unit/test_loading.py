"""From a folder to a model: what is read, and what somebody is told whose folder is not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator as build_speculator
from paceline.model import SlotTable, load
from paceline.model.model import TransformersModel
from paceline.model.target_weights import TargetWeights
from paceline.model_names import ModelNotFoundError
from tests.helpers.checkpoints import save_checkpoint, save_tokenizer
from tests.helpers.llamas import POSITIONS, VOCABULARY, peaked_llama

CONFIG = EngineConfig(slots=512)


def nothing_lent() -> TargetWeights:
    raise AssertionError("this method needs nothing of the target's")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), eos_token_ids=[5, 7])


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_a_checkpoint_is_loaded_and_computes_what_transformers_computes(checkpoint: Path) -> None:
    model = load(str(checkpoint), CONFIG)
    assert isinstance(model, TransformersModel)
    assert (model.vocabulary_size, model.max_model_len, model.slots) == (VOCABULARY, POSITIONS, 512)
    assert model.eos_token_ids == (5, 7)
    assert model.rows_invariant
    lane, tokens = SlotTable(), [3, 1, 4, 1, 5]
    lane.slots = [9, 2, 7, 11, 512]
    ours = model.run([lane.row(token, i) for i, token in enumerate(tokens)], [4]).logits[0]
    with torch.inference_mode():
        theirs = peaked_llama()(torch.tensor([tokens])).logits[0, -1]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_dtype_and_length_are_as_configured(checkpoint: Path) -> None:
    model = load(str(checkpoint), EngineConfig(slots=256, dtype="bfloat16", max_model_len=100))
    lane = SlotTable()
    lane.slots = [1]
    assert model.dtype is torch.bfloat16
    assert model.max_model_len == 100


def test_the_end_of_text_may_stand_in_the_model_s_own_configuration(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert load(str(copy), CONFIG).eos_token_ids == (9,)


def test_equal_vocabularies_have_equal_fingerprints(checkpoint: Path, copy: Path) -> None:
    assert load(str(checkpoint), CONFIG).fingerprint == load(str(copy), CONFIG).fingerprint
    save_tokenizer(copy, range(VOCABULARY - 1, -1, -1))
    assert load(str(checkpoint), CONFIG).fingerprint != load(str(copy), CONFIG).fingerprint


def test_mimo_is_known_without_code_from_its_folder(copy: Path) -> None:
    """Its checkpoints name classes of their own; what they compute is Qwen2."""
    config = json.loads((copy / "config.json").read_text())
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "nowhere.MiMoConfig"}}
    (copy / "config.json").write_text(json.dumps(config | own))
    weights = load_file(copy / "model.safetensors")
    for layer in range(2):
        for projection in "qkv":
            weight = weights[f"model.layers.{layer}.self_attn.{projection}_proj.weight"]
            weights[f"model.layers.{layer}.self_attn.{projection}_proj.bias"] = torch.zeros(len(weight))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    lane = SlotTable()
    lane.slots = [1]
    ours = load(str(copy), CONFIG).run([lane.row(3, 0)], [0]).logits[0]
    with torch.inference_mode():
        theirs = peaked_llama()(torch.tensor([[3]])).logits[0, -1]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_table_needs_no_folder() -> None:
    assert load("table:64", CONFIG).vocabulary_size == 64


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model at .*nowhere: .*hf download"):
        load(str(tmp_path / "nowhere"), CONFIG)


def test_no_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json: save the model's tokenizer there"):
        load(str(copy), CONFIG)


def truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "abacus"}')


BROKEN = [
    (truncated_weights, "cannot be loaded: .*metadata"),
    (no_weights, "cannot be loaded: .*no file named model.safetensors"),
    (broken_config, "cannot be loaded: .*not a valid JSON"),
    (unknown_architecture, "cannot be loaded: .*`abacus`"),
]


@pytest.mark.parametrize(("damage", "said"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_a_broken_checkpoint_says_what_is_broken(damage: object, said: str, copy: Path) -> None:
    damage(copy)  # type: ignore[operator]
    with pytest.raises(ValueError, match=said) as caught:
        load(str(copy), CONFIG)
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_a_target_is_refused_though_its_mtp_layer_can_be_loaded(kind: str, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": kind, "num_experts": 2, "layer_types": None}))
    with pytest.raises(ValueError, match="has layers of the kind linear_attention"):
        load(str(copy), CONFIG)


def test_a_model_that_keeps_a_state_is_refused_before_it_is_read(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    layers = ["linear_attention", "full_attention"]
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_next", "layer_types": layers}))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has layers of the kind linear_attention: choose a model with full or slid"):
        load(str(copy), CONFIG)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    """transformers would fill them with noise and only log it."""
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks weights \(model.layers.1.mlp.up_proj.weight, ...\): download it again"
    ):
        load(str(copy), CONFIG)


def with_weights(folder: Path, **more: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_without_a_place_are_refused_by_name(copy: Path) -> None:
    """Of a quantised checkpoint they are the scales: transformers would leave them out and only log it."""
    name = "model.layers.1.mlp.up_proj.weight_scale"
    with_weights(copy, **{name: torch.ones(1)})
    with pytest.raises(ValueError, match=rf"has weights that LlamaForCausalLM has no place for \({name}\)"):
        load(str(copy), CONFIG)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.k_scale"])
def test_what_changes_nothing_may_lie_in_a_checkpoint(copy: Path, name: str) -> None:
    with_weights(copy, **{name: torch.ones(1)})
    assert load(str(copy), CONFIG).rows_invariant


def test_layers_after_the_last_are_for_drafting_only_where_the_configuration_says_so(copy: Path) -> None:
    with_weights(copy, **{"model.layers.2.mlp.up_proj.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"no place for \(model.layers.2"):
        load(str(copy), CONFIG)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert load(str(copy), CONFIG).rows_invariant


def test_float16_becomes_what_a_cpu_computes_in(copy: Path) -> None:
    weights = {name: weight.half() for name, weight in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
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
"""Small multimodal models, by kind."""


@pytest.mark.parametrize("kind", TOWERS)
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **TOWERS[kind])
    network = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(VOCABULARY))
    tokens = [(11 * i + 7) % VOCABULARY for i in range(40)]
    lane = SlotTable(range(1, 41))
    ours = load(str(tmp_path), CONFIG).run([lane.row(token, i) for i, token in enumerate(tokens)], range(40)).logits
    with torch.inference_mode():
        theirs = network(input_ids=torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_an_architecture_that_is_not_computed_here_is_refused_with_one_sentence(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there(checkpoint: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here, choose another"):
        load(str(checkpoint), EngineConfig(device=device))


def test_more_positions_than_the_model_has(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len 513 exceeds the 512 positions of .*: lower it"):
        load(str(checkpoint), EngineConfig(max_model_len=513))


def test_a_draft_may_have_fewer_positions_than_its_target(checkpoint: Path) -> None:
    """max_model_len is the target's; the draft guesses as far as it can."""
    config = SpeculativeConfig(method="draft_model", model=str(checkpoint))
    draft = build_speculator(config, EngineConfig(slots=256, max_model_len=100_000), nothing_lent)
    assert draft.position_limit == POSITIONS
    assert draft.vocabulary_size == VOCABULARY


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (SpeculativeConfig(), "method 'none' drafts nothing"),
        (SpeculativeConfig(method="custom_class", speculator="nowhere.at.all"), "'nowhere.at.all' cannot be imported"),
        (SpeculativeConfig(method="custom_class", speculator="all"), "'all' cannot be imported"),
        (SpeculativeConfig(method="custom_class", speculator="builtins.zip"), "made a zip, which is no Speculator"),
    ],
)
def test_a_speculator_that_cannot_be_built(config: SpeculativeConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_speculator(config, CONFIG, nothing_lent)
