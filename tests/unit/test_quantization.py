"""Quantised checkpoints in their libraries' formats, built number by number, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.config import EngineConfig
from paceline.model import SlotTable, load
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.llamas import VOCABULARY

CONFIG = EngineConfig(slots=256)
GROUP = 32
Stored = tuple[Tensor, dict[str, Tensor]]
"""A weight [out, in], and the tensors that store it, by the last part of their names."""


def numbers(out: int, width: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high, (out, width), dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    """Scales that make weights of the usual size."""
    return (torch.rand(shape) + 0.5) * 0.02


def fp8_blocks(out: int, width: int) -> Stored:
    """DeepSeek's, with sides of 48, so that the last blocks are partial."""
    stored, each = (torch.randn(out, width) * 8).to(torch.float8_e4m3fn), scales(-(-out // 48), -(-width // 48))
    weight = stored.float()
    for i in range(out):
        for j in range(width):
            weight[i, j] *= each[i // 48, j // 48]
    return weight, {"weight": stored, "weight_scale_inv": each}


def fp8_whole(out: int, width: int) -> Stored:
    stored, scale = (torch.randn(out, width) * 8).to(torch.float8_e4m3fn), scales(1)[0]
    return stored.float() * scale, {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def fp8_rows(out: int, width: int) -> Stored:
    stored, scale = (torch.randn(out, width) * 8).to(torch.float8_e4m3fn), scales(out, 1)
    return stored.float() * scale, {"weight": stored, "weight_scale": scale}


def int8_rows(out: int, width: int) -> Stored:
    stored, scale, zero = numbers(out, width, -128, 128).to(torch.int8), scales(out, 1) / 8, numbers(out, 1, -9, 9)
    weight = (stored.float() - zero) * scale
    return weight, {"weight": stored, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def packed(table: list[list[int]], bits: int) -> Tensor:
    """Rows of unsigned numbers, packed in 32 bits each, lowest bits first."""
    per_integer = 32 // bits
    integers = []
    for row in table:
        row = row + [0] * (-len(row) % per_integer)
        sums = [
            sum(n << (bits * i) for i, n in enumerate(row[at : at + per_integer]))
            for at in range(0, len(row), per_integer)
        ]
        integers.append([each - 2**32 if each >= 2**31 else each for each in sums])
    return torch.tensor(integers, dtype=torch.int32)


def grouped(weight: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """[out, in], [out, groups] twice."""
    result = weight.float().clone()
    for j in range(weight.shape[1]):
        result[:, j] = (weight[:, j] - zero[:, j // GROUP]) * scale[:, j // GROUP]
    return result


def int4_packed(out: int, width: int, *, asymmetric: bool = False) -> Stored:
    weight, scale = numbers(out, width, 0, 16), scales(out, width // GROUP)
    zero = numbers(out, width // GROUP, 5, 11) if asymmetric else torch.full((out, width // GROUP), 8)
    parts = {"weight_packed": packed(weight.tolist(), 4), "weight_scale": scale}
    parts["weight_shape"] = torch.tensor([out, width])
    if asymmetric:
        parts["weight_zero_point"] = packed(zero.T.tolist(), 4).T.contiguous()
    return grouped(weight, zero, scale), parts


def int4_packed_with_zeros(out: int, width: int) -> Stored:
    return int4_packed(out, width, asymmetric=True)


def awq(out: int, width: int) -> Stored:
    weight, zero, scale = numbers(out, width, 0, 16), numbers(out, width // GROUP, 0, 16), scales(out, width // GROUP)

    def columns(x: Tensor) -> Tensor:
        """[in, out]: of eight neighbours the even ones are first."""
        order = [8 * at + i for at in range(out // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        return packed(x.T[:, order].tolist(), 4)

    parts = {"qweight": columns(weight), "qzeros": columns(zero), "scales": scale.T.contiguous()}
    return grouped(weight, zero, scale), parts


def gptq(out: int, width: int, *, bits: int = 4, less: int = 1) -> Stored:
    """`less`: what is subtracted from stored zero points."""
    weight = numbers(out, width, 0, 2**bits)
    zero, scale = numbers(out, width // GROUP, 1, 2**bits), scales(out, width // GROUP) / 2 ** (bits - 4)
    order = torch.randperm(width)  # by activation: each column has its group's index
    groups = torch.arange(width)[order] // GROUP
    meant = weight.float()
    for j in range(width):
        meant[:, j] = (weight[:, j] - zero[:, groups[j]]) * scale[:, groups[j]]
    return meant, {
        "qweight": packed(weight.tolist(), bits).T.contiguous(),
        "qzeros": packed((zero - less).T.tolist(), bits),
        "scales": scale.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def gptq_v2(out: int, width: int) -> Stored:
    return gptq(out, width, bits=8, less=0)


def compressed(form: str, bits: int, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FORMATS: Mapping[str, tuple[Callable[[int, int], Stored], dict[str, Any]]] = {
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [48, 48]}),
    "fp8-whole": (fp8_whole, {"quant_method": "fp8"}),
    "modelopt": (fp8_whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "float-quantized": (fp8_rows, compressed("float-quantized", 8, "float")),
    "int-quantized": (int8_rows, compressed("int-quantized", 8)),
    "pack-quantized": (int4_packed, compressed("pack-quantized", 4)),
    "pack-quantized-zeros": (int4_packed_with_zeros, compressed("pack-quantized", 4)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq_v2": (gptq_v2, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"}),
}


def quantise(folder: Path, make: Callable[[int, int], Stored]) -> dict[str, Tensor]:
    """Quantise every projection of a checkpoint. Returns the weights that it stands for, by name."""
    torch.manual_seed(8)
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = weight
            continue
        meant[name], parts = make(*weight.shape)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return meant


def set_quantization(folder: Path, settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def check(folder: Path, network: LlamaForCausalLM, meant: Mapping[str, Tensor]) -> None:
    """Assert that the loaded model computes the same as a network with these weights."""
    network.load_state_dict(meant)
    tokens = [(11 * i + 7) % VOCABULARY for i in range(20)]
    table = SlotTable(range(1, 21))
    ours = load(str(folder), CONFIG).run([table.row(token, i) for i, token in enumerate(tokens)], range(20)).logits
    with torch.inference_mode():
        theirs = network(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path)


@pytest.fixture
def network(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_dequantised(form: str, folder: Path, network: LlamaForCausalLM) -> None:
    make, settings = FORMATS[form]
    meant = quantise(folder, make)
    set_quantization(folder, settings)
    check(folder, network, meant)


def test_older_modelopt_checkpoints_have_a_file_of_their_own(folder: Path, network: LlamaForCausalLM) -> None:
    """transformers loads such a checkpoint without scales."""
    meant = quantise(folder, fp8_whole)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    check(folder, network, meant)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt as NVFP4"),
        (compressed("nvfp4-pack-quantized", 4, "float"), "compressed-tensors as nvfp4-pack-quantized"),
        (compressed("pack-quantized", 3), "compressed-tensors as weights of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq as gemv of 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq as gptq of 3 bits"),
    ],
)
def test_other_formats_are_refused_by_name(settings: object, message: str, folder: Path) -> None:
    set_quantization(folder, settings)
    with pytest.raises(ValueError, match=f"is quantised by {message}, which is not read here: take one in"):
        load(str(folder), CONFIG)


def test_a_method_that_needs_a_library_names_it(folder: Path) -> None:
    set_quantization(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match=r"cannot be loaded: .*bitsandbytes") as caught:
        load(str(folder), CONFIG)
    assert "\n" not in str(caught.value)


def test_a_part_that_is_missing_is_named(folder: Path) -> None:
    quantise(folder, awq)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.scales"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, FORMATS["awq"][1])
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.scales: download it again"):
        load(str(folder), CONFIG)
