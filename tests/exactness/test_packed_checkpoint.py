"""A folder whose weights are packed computes what they say then, and a row depends on its own path alone."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.engine_config import Quantization
from paceline.doctor.measurement import need
from paceline.llm import LLM
from paceline.memory_plan import _outlined
from paceline.model import load
from paceline.model.block_quantization import TYPES, quantized
from paceline.model.checkpoint import Checkpoint
from paceline.model.layer_weights import MATRICES, LayerWeights, QuantizedWeight
from paceline.model.native import native_network
from paceline.model.native.native_library import dequantize
from paceline.model.packed_floats import floats
from paceline.model.packed_integers import integers
from paceline.model.packed_model import PackedModel
from paceline.model.quantization import METHODS, dequantized_module
from tests.helpers.checkpoints import change_config, change_weights, save_tokenizer
from tests.helpers.gguf_files import BASE, tiny_config
from tests.helpers.quantized_checkpoints import FLOATS, FORMATS, INTEGERS, PACKED, fp8_groups, quantise
from tests.helpers.row_runs import assert_same, chunks, lockstep, one_by_one, random_trees

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

QUANTIZATIONS: tuple[Quantization, ...] = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
KINDS = ("llama", "mistral", "qwen2", "qwen3")
INT8_ROWS = 0.06
"""Difference from float32 rows, relative to the logits."""
SEQUENCE = [(37 * i + 11) % 300 for i in range(120)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def write(kind: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(tiny_config(kind)).float()
        with torch.no_grad():
            for each in network.parameters():
                each.copy_(torch.randn_like(each) * (1.0 if each.dim() == 1 else 0.2))
        network.save_pretrained(folder)
        save_tokenizer(folder, range(BASE["vocab_size"]))
        return folder

    return write


def loaded(folder: Path, quantization: Quantization, dtype: str = "float32") -> PackedModel:
    model = load(str(folder), EngineConfig(slots=2048, dtype=dtype, quantization=quantization))
    assert isinstance(model, PackedModel)
    return model


def rounded_by_gguf(network: nn.Module, quantization: str) -> nn.Module:
    """With the numbers that the package `gguf` makes of every matrix, of embedding and output by Q8_0."""
    for name, each in network.named_parameters():
        if each.dim() == 2:
            outer = name in ("model.embed_tokens.weight", "lm_head.weight")
            kind = gguf.GGMLQuantizationType["Q8_0" if outer else quantization.upper()]
            numbers = gguf.quants.dequantize(gguf.quants.quantize(each.detach().numpy(), kind), kind)
            each.data = torch.from_numpy(numbers)
    return network


def difference(model: PackedModel, network: nn.Module) -> float:
    with torch.inference_mode():
        expected = network(torch.tensor([SEQUENCE[:60]])).logits[0]
    return float((torch.stack(one_by_one(model, SEQUENCE[:60])) - expected).norm() / expected.norm())


def network_of(folder: Path) -> nn.Module:
    network: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return network


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_packed_folder_computes_what_transformers_computes_with_its_numbers(
    kind: str, quantization: Quantization, folders: Any
) -> None:
    folder = folders(kind)
    assert difference(loaded(folder, quantization), rounded_by_gguf(network_of(folder), quantization)) < INT8_ROWS


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("width", [64, 992])
def test_blocks_are_those_of_the_gguf_package(quantization: Quantization, width: int) -> None:
    matrix = torch.randn(1500, width, generator=torch.Generator().manual_seed(3))
    matrix[5] = 0
    matrix[:, 7] = 0.5
    kind = gguf.GGMLQuantizationType[quantization.upper()]
    np.testing.assert_array_equal(quantized(matrix, quantization, "x").data, gguf.quants.quantize(matrix.numpy(), kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
def test_rows_equal_one_row_at_a_time(quantization: Quantization, dtype: str, folders: Any) -> None:
    folder = folders("qwen2")
    alone = one_by_one(loaded(folder, quantization, dtype), SEQUENCE)
    assert_same(random_trees(loaded(folder, quantization, dtype), SEQUENCE), alone)
    assert_same(chunks(loaded(folder, quantization, dtype), SEQUENCE, 17), alone)
    assert_same(lockstep(loaded(folder, quantization, dtype), [SEQUENCE[:30], SEQUENCE])[-1], alone)


def test_layers_that_slide_see_their_window_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(tiny_config("mistral", sliding_window=8)).float().eval()
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    assert difference(loaded(tmp_path, "q8_0"), rounded_by_gguf(network, "q8_0")) < INT8_ROWS


def test_the_choice_is_part_of_the_numerics(folders: Any) -> None:
    lines = {each: loaded(folders("llama"), each).numerics for each in QUANTIZATIONS}
    assert len(set(lines.values())) == len(lines)
    assert "float32 packed as q4_0" in lines["q4_0"]


def test_rows_that_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("llama", intermediate_size=80)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has rows of 80 numbers, and q4_0"):
        load(str(tmp_path), EngineConfig(slots=256, quantization="q4_0"))


def test_a_later_layer_that_cannot_be_read_is_refused_by_name(folders: Any, tmp_path: Path) -> None:
    def cut(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.1.mlp.up_proj.weight"
        return weights | {name: weights[name][:-1].contiguous()}

    network_of(folders("llama")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    change_weights(tmp_path, cut)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has the shape \[95, 64\]"):
        loaded(tmp_path, "q8_0")


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "meta"},
        {"tensor_parallel_size": 2},
    ],
)
def test_where_nothing_is_packed_the_choice_is_refused(settings: dict[str, Any], folders: Any) -> None:
    refusal = "packed weights are for one process on a CPU, or on an NVIDIA GPU with Triton: take quantization q8_0 out"
    with pytest.raises(ValueError, match=refusal):
        load(str(folders("llama")), EngineConfig(slots=256, quantization="q8_0", **settings))


def test_a_kind_that_native_code_does_not_compute_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("starcoder2")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is of the kind starcoder2, and packed are llama, mistral"):
        load(str(tmp_path), EngineConfig(slots=256, quantization="q4_0"))


def test_weights_are_missing_or_too_many(folders: Any, tmp_path: Path) -> None:
    network_of(folders("qwen2")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    change_weights(tmp_path, lambda weights: weights | {"model.layers.0.mlp.router.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.mlp\.router\.weight, which Qwen2ForCausalLM"):
        loaded(tmp_path, "q8_0")
    change_weights(tmp_path, lambda weights: {k: v for k, v in weights.items() if "0.mlp" not in k})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.down_proj\.weight"):
        loaded(tmp_path, "q8_0")


def test_a_gguf_file_and_a_quantised_folder_stay_as_they_are(folders: Any, tmp_path: Path) -> None:
    network_of(folders("llama")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    model = load(str(tmp_path), EngineConfig(slots=256, quantization="q4_0", dtype="float32"))
    assert "q4_0" not in model.numerics


def test_the_plan_counts_packed_bytes(folders: Any) -> None:
    def weights(quantization: Quantization | None) -> int:
        found = _outlined(str(folders("qwen2")), EngineConfig(quantization=quantization))
        assert found is not None
        return found[1].weights

    numbers = sum(each.numel() for each in network_of(folders("qwen2")).parameters() if each.dim() == 2)
    outer = 2 * BASE["vocab_size"] * BASE["hidden_size"]
    assert weights(None) > 4 * numbers
    for quantization in QUANTIZATIONS:
        block = TYPES[quantization]
        packed = outer * 34 // 32 + (numbers - outer) * block.bytes // block.size
        assert 0 < weights(quantization) - packed < 0.2 * packed  # norms and biases


WIDE_INT8_ROWS = 0.1
"""As `INT8_ROWS`, for codes of all sizes alike; seen: up to 0.065. Other numbers show as 0.5 and more."""
FLOAT_ROWS = 1e-5
"""As `INT8_ROWS`, for weights in e4m3, whose rows are not rounded to int8."""
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(("out", "width"), [(48, 256), (64, 384), (144, 416)])
def test_a_format_s_numbers_are_kept_exactly(form: str, out: int, width: int) -> None:
    if (form in INTEGERS or form == "float-quantized group") and width % 128:
        pytest.skip("groups are of one size")
    torch.manual_seed(5)
    make, settings = PACKED[form]
    meant, parts = make(out, width)
    packed = integers(parts.get, settings) if form in INTEGERS else floats(parts.get, settings)
    assert packed is not None
    assert torch.equal(dequantize(packed), meant)
    assert torch.equal(METHODS[settings["quant_method"]][1](parts.get, settings), meant)


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().index_fill(1, torch.tensor([3]), torch.nan).to(weight.dtype)


@pytest.mark.parametrize(
    "changed",
    [
        lambda parts: parts | {"weight": parts["weight"].float().to(torch.float8_e5m2)},
        lambda parts: parts | {"weight": with_nan(parts["weight"])},
        lambda parts: parts | {"weight_scale": parts["weight_scale"].repeat_interleave(2, 1)},
        lambda parts: {"weight": parts["weight"]},
    ],
    ids=["e5m2", "nan", "groups of 64", "no scale"],
)
def test_floats_of_other_kinds_are_not_packed(changed: Any) -> None:
    parts = fp8_groups(64, 256, sides=(1, 128))[1]
    assert floats(parts.get, {}) is not None
    assert floats(changed(parts).get, {}) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_in_16_bits_are_kept_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    make, settings = INTEGERS["awq 128"]
    _, parts = make(48, 256)
    parts["scales"] = (parts["scales"] * 2.0**-14).to(dtype)
    matrix = integers(parts.get, settings)
    assert matrix is not None
    assert torch.equal(dequantize(matrix), METHODS["awq"][1](parts.get, settings))


def test_groups_in_the_order_of_activations_are_not_packed() -> None:
    make, settings = FORMATS["gptq"]
    assert integers(make(64, 128)[1].get, settings) is None


def quantised_folder(folder: Path, form: str, kind: str = "qwen2") -> nn.Module:
    """Writes it, and returns the network that it stands for."""
    torch.manual_seed(7)
    network = AutoModelForCausalLM.from_config(tiny_config(kind, **WIDE)).float().eval()
    network.save_pretrained(folder)
    save_tokenizer(folder, range(BASE["vocab_size"]))
    network.load_state_dict(quantise(folder, form), strict=False)
    return network


@pytest.mark.parametrize("form", PACKED)
def test_a_quantised_folder_stays_packed_and_computes_what_it_says(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[type] = []
    give = native_network._LayerFeed._give

    def noted(feed: Any, layer: LayerWeights[Any]) -> None:
        seen.extend(type(getattr(layer, name)) for name in MATRICES)
        give(feed, layer)

    monkeypatch.setattr(native_network._LayerFeed, "_give", noted)
    network = quantised_folder(tmp_path, form)
    model = load(str(tmp_path), EngineConfig(slots=2048, dtype="float32"))
    assert isinstance(model, PackedModel)
    assert seen == [QuantizedWeight] * (2 * len(MATRICES))
    assert difference(model, network) < (FLOAT_ROWS if form in FLOATS and "mxfp4" not in form else WIDE_INT8_ROWS)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_a_matrix_that_cannot_be_packed_is_multiplied_out(form: str, tmp_path: Path) -> None:
    network = quantised_folder(tmp_path, form, "llama")
    assert difference(load(str(tmp_path), EngineConfig(slots=2048, dtype="float32")), network) < 1e-3


@pytest.mark.parametrize("form", ["gptq 128", "fp8-blocks 128"])
def test_a_matrix_that_is_multiplied_out_stands_beside_packed_ones(form: str, tmp_path: Path) -> None:
    """Queries and values stay packed, keys do not; the three are one product."""
    network = quantised_folder(tmp_path, form)
    module, settings = "model.layers.0.self_attn.k_proj", PACKED[form][1]

    def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        order = torch.randperm(WIDE["hidden_size"], generator=torch.Generator().manual_seed(1))
        if form == "gptq 128":
            return weights | {f"{module}.g_idx": weights[f"{module}.g_idx"][order]}
        return weights | {f"{module}.weight": weights[f"{module}.weight"].float().to(torch.float8_e5m2)}

    change_weights(tmp_path, changed)
    network.get_submodule(module).weight.data = dequantized_module(Checkpoint(tmp_path), module, settings)
    bound = FLOAT_ROWS if form in FLOATS else WIDE_INT8_ROWS
    assert difference(load(str(tmp_path), EngineConfig(slots=2048, dtype="float32")), network) < bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["awq 128", "pack-quantized", "int8 by row", "fp8-blocks 128", "mxfp4-pack-quantized"])
def test_rows_of_a_quantised_folder_equal_one_row_at_a_time(form: str, dtype: str, tmp_path: Path) -> None:
    quantised_folder(tmp_path, form, "llama")
    engine = EngineConfig(slots=2048, dtype=dtype)
    alone = one_by_one(load(str(tmp_path), engine), SEQUENCE)
    assert_same(random_trees(load(str(tmp_path), engine), SEQUENCE), alone)
    assert_same(chunks(load(str(tmp_path), engine), SEQUENCE, 17), alone)


@pytest.mark.parametrize(
    ("form", "of_a_number"),
    [
        ("awq 128", 0.5 + 4.5 / 128),
        ("fp8-whole", 1 + 4 / 128),
        ("fp8-blocks 128", 1 + 4 / 128),
        ("mxfp4-pack-quantized", 17 / 32),
        ("mxfp8-quantized", 4.0),
    ],
)
def test_the_plan_knows_a_quantised_folder_s_bytes(form: str, of_a_number: float, tmp_path: Path) -> None:
    quantised_folder(tmp_path, form, "qwen2")
    found = _outlined(str(tmp_path), EngineConfig(dtype="float32"))
    assert found is not None
    network = network_of_config(tmp_path)
    layers = sum(each.numel() for name, each in network.named_parameters() if name.endswith("_proj.weight"))
    outer = 4 * 2 * BASE["vocab_size"] * WIDE["hidden_size"]
    assert 0 < found[1].weights - outer - layers * of_a_number < 0.1 * layers


def test_the_doctor_knows_the_bytes_of_a_packed_draft(folders: Any) -> None:
    target = LLM(str(folders("qwen2")), engine_config={"slots": 512, "quantization": "q4_0"})
    config = SpeculativeConfig(method="draft_model", model=str(folders("llama")))
    found = _outlined(str(folders("llama")), EngineConfig(quantization="q4_0"))
    assert found is not None
    assert need(target, config).weights == found[1].weights


def network_of_config(folder: Path) -> nn.Module:
    network: nn.Module = AutoModelForCausalLM.from_config(tiny_config("qwen2", **WIDE))
    return network
