"""Loading checkpoints, plain and quantised, and the errors for broken and unsupported ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator
from paceline.model import Model, Row, SlotTable, load, model_loader
from paceline.model.decoder import Reference, check_logits
from paceline.model.loading import build, load_checkpoint
from paceline.model.model import TransformersModel
from paceline.model.rows import TILE
from paceline.model_names import ModelNotFoundError
from tests.helpers.checkpoints import change_config, change_weights, save_checkpoint, save_tokenizer
from tests.helpers.llamas import POSITIONS, VOCABULARY, peaked_llama
from tests.helpers.quantized_checkpoints import FORMATS, compressed, quantise

CONFIG = EngineConfig(slots=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), eos_token_ids=[5, 7])


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


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
    assert (model.eos_token_ids, model.rows_invariant) == ((5, 7), True)
    assert_equal_logits(model, peaked_llama(), [3, 1, 4, 1, 5])
    model = load(str(checkpoint), EngineConfig(slots=256, dtype="bfloat16", max_model_len=100))
    assert isinstance(model, TransformersModel)
    assert (model.dtype, model.max_model_len) == (torch.bfloat16, 100)


def test_each_phase_of_a_start_is_logged_with_its_seconds(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline.telemetry.logs")
    load(str(checkpoint), EngineConfig(slots=512, verify=True))
    phases = [record for record in caplog.records if record.name == "paceline.telemetry.logs"]
    assert [record.message for record in phases] == ["weights read", "network built", "rows probed"]
    assert all(0 <= record.__dict__["seconds"] < 60 for record in phases)


def test_rows_are_probed_where_torch_computes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(return_value=False)
    monkeypatch.setattr("paceline.model.model_loader.is_row_invariant", probe)
    assert load(str(checkpoint), CONFIG).rows_invariant
    probe.assert_not_called()
    monkeypatch.setattr("paceline.model.network_factory.DTYPES", {})
    by_torch = load(str(checkpoint), CONFIG)
    probe.assert_called_once_with(by_torch, ())
    assert not by_torch.rows_invariant


def test_vocabulary_and_end_of_text_are_the_checkpoint_s(checkpoint: Path, copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    change_config(copy, eos_token_id=9)
    original, other = load(str(checkpoint), CONFIG), load(str(copy), CONFIG)
    assert other.eos_token_ids == (9,), "without a generation configuration"
    assert other.fingerprint == original.fingerprint
    save_tokenizer(copy, range(VOCABULARY - 1, -1, -1))
    assert load(str(copy), CONFIG).fingerprint != original.fingerprint


def test_mimo_needs_no_code_from_its_folder(copy: Path) -> None:
    """MiMo's checkpoints name classes of their own, which compute the same as Qwen2."""
    change_config(
        copy, model_type="mimo", architectures=["MiMoForCausalLM"], auto_map={"AutoConfig": "nowhere.MiMoConfig"}
    )
    products = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkv"]
    change_weights(copy, lambda w: w | {f"{name}.bias": torch.zeros(len(w[f"{name}.weight"])) for name in products})
    assert_equal_logits(load(str(copy), CONFIG), peaked_llama(), [3])


def test_a_model_that_is_wrong_from_the_second_tile_on_is_refused() -> None:
    """Rows of the first tile attend by another way than later ones, whose paths have full tiles before the last."""
    for window, right in ((0, True), (TILE, False)):
        network = peaked_llama()
        for layer in network.model.layers:
            layer.self_attn.sliding_window = window  # ours has it; transformers takes that of the configuration, none
        with nullcontext() if right else pytest.raises(ValueError, match="its logits are off by"):
            build(network, "windowed", EngineConfig(slots=512, verify=True), "", [])
        assert isinstance(build(network, "windowed", EngineConfig(slots=512), "", []), TransformersModel)


@pytest.mark.parametrize(
    ("dtype", "rounding", "error", "right"),
    [
        (torch.float32, 0.0, 5e-4, True),
        (torch.float32, 0.0, 2e-3, False),
        (torch.bfloat16, 0.0, 0.09, True),
        (torch.bfloat16, 0.0, 0.11, False),
        (torch.bfloat16, 0.08, 0.23, True),  # a deep model's own rounding
        (torch.bfloat16, 0.08, 0.25, False),
        (torch.bfloat16, 5.0, 0.45, False),  # transformers' other way to attend is wrong
    ],
)
def test_the_tolerance_is_that_of_rounding(dtype: torch.dtype, rounding: float, error: float, right: bool) -> None:
    tokens = list(range(TILE + 8))
    expected = torch.eye(len(tokens))

    def run(rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
        return expected[[rows[i].token for i in wanted]] + error

    with nullcontext() if right else pytest.raises(ValueError, match="its logits are off by"):
        check_logits(run, tokens, Reference(expected, rounding), dtype)


def test_a_deep_model_is_not_refused_for_its_own_rounding() -> None:
    """With weights this large, 16 bits are off by more than the usual tolerance, by transformers and here alike."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 48, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=128, initializer_range=0.25, **sizes)
    network = LlamaForCausalLM(config).to(torch.bfloat16)
    build(network, "deep", EngineConfig(slots=512, verify=True), "", [])


def test_a_missing_model_or_tokenizer(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model at .*nowhere: .*hf download"):
        load(str(tmp_path / "nowhere"), CONFIG)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json: save the model's tokenizer there"):
        load(str(copy), CONFIG)


MTP_TENSOR = "model.layers.2.mlp.up_proj.weight"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"
UP = "model.layers.1.mlp.up_proj.weight"
UNKNOWN_LAYERS = "has layers of the kind chunked_attention, and known are attention, conv"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        r"model.safetensors cannot be read \(.*metadata",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded: .*no file named model"),
    "broken configuration": (lambda folder: (folder / "config.json").write_text("{"), r"config.json cannot be read"),
    "unknown architecture": (lambda folder: change_config(folder, model_type="abacus"), "cannot be loaded: .*`abacus`"),
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
    "unknown layers": (  # before its weights are read
        lambda folder: (
            change_config(folder, layer_types=["chunked_attention"] * 2),
            (folder / "model.safetensors").unlink(),
        ),
        UNKNOWN_LAYERS,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_or_unsupported_checkpoint_is_refused_with_a_reason(fault: str, copy: Path) -> None:
    damage, message = FAULTS[fault]
    damage(copy)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(copy), CONFIG)
    assert str(copy) in str(caught.value)


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


@pytest.mark.parametrize(
    ("device", "native", "reason"),
    [
        ("cuda", "", "which is for CPUs: leave it out, or set device to cpu"),
        ("cpu", "0", "and there is none: PACELINE_NATIVE=0 switches the native pass off"),
    ],
)
def test_a_cache_in_8_bits_takes_native_code(
    checkpoint: Path, device: str, native: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", native)
    with pytest.raises(ValueError, match=f"^kv_cache_dtype int8 takes native code, {reason}$"):
        load(str(checkpoint), EngineConfig(slots=512, device=device, kv_cache_dtype="int8"))


def test_a_gpu_has_tables_for_so_many_requests(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 600: on a GPU at most 512 requests run at once"):
        load(str(checkpoint), EngineConfig(slots=512, device="cuda", max_num_seqs=600))


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
    """max_model_len is the target's; the draft guesses as far as it can, without the target's weights."""
    config = SpeculativeConfig(method="draft_model", model=str(checkpoint))
    draft = build_speculator(config, EngineConfig(slots=256, max_model_len=100_000), pytest.fail)
    assert (draft.description.position_limit, draft.description.vocabulary_size) == (POSITIONS, VOCABULARY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "method 'none' drafts nothing"),
        ({"method": "custom_class", "speculator": "nowhere.at.all"}, "'nowhere.at.all' cannot be imported"),
        ({"method": "custom_class", "speculator": "all"}, "'all' cannot be imported"),
        ({"method": "custom_class", "speculator": "builtins.zip"}, "made a zip, which is no Speculator"),
    ],
)
def test_a_speculator_that_cannot_be_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_speculator(SpeculativeConfig.model_validate(settings), CONFIG, pytest.fail)


# Quantised checkpoints


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_dequantised(form: str, copy: Path) -> None:
    network = LlamaForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    network.load_state_dict(quantise(copy, form))
    assert_equal_logits(load_checkpoint(str(copy), CONFIG), network, [(11 * i + 7) % VOCABULARY for i in range(20)])


NOT_READ = "is quantised by {}, which is not read here: take one in"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NOT_READ.format("modelopt as NVFP4")),
        (
            compressed("nvfp4-pack-quantized", 4, "float"),
            NOT_READ.format("compressed-tensors as nvfp4-pack-quantized"),
        ),
        (compressed("pack-quantized", 3), NOT_READ.format("compressed-tensors as weights of 3 bits")),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, NOT_READ.format("awq as gemv of 4 bits")),
        ({"quant_method": "gptq", "bits": 3}, NOT_READ.format("gptq as gptq of 3 bits")),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "data_type": "fp"},
            NOT_READ.format("auto-round as auto_round:fp8_static of 8 bits, fp"),
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "cannot be loaded: .*bitsandbytes"),
    ],
)
def test_other_formats_are_refused_by_name(settings: object, message: str, copy: Path) -> None:
    change_config(copy, quantization_config=settings)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(copy), CONFIG)
    assert "\n" not in str(caught.value)


def test_a_part_that_is_missing_is_named(copy: Path) -> None:
    quantise(copy, "awq")
    name = "model.layers.0.mlp.up_proj.scales"
    change_weights(copy, lambda weights: {other: weights[other] for other in weights if other != name})
    with pytest.raises(ValueError, match=rf"lacks {name}: download it again"):
        load(str(copy), CONFIG)


def test_a_native_model_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests prove that its rows are invariant. A start has no time for a hundred passes."""
    monkeypatch.setattr(model_loader, "is_row_invariant", lambda *_: pytest.fail("probed"))
    assert load("pydoc", CONFIG).rows_invariant
