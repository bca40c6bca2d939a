"""Quantised checkpoints, built number by number in their libraries' formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.checkpoints import change_config, change_weights

GROUP = 32
Stored = tuple[Tensor, dict[str, Tensor]]
"""A weight [out, in], and the tensors that store it, by the last part of their names."""


def numbers(out: int, width: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high, (out, width), dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    """Scales that make weights of the usual size."""
    return (torch.rand(shape) + 0.5) * 0.02


def fp8(out: int, width: int) -> Tensor:
    return (torch.randn(out, width) * 8).to(torch.float8_e4m3fn)


def fp8_whole(out: int, width: int) -> Stored:
    stored, scale = fp8(out, width), scales(1)[0]
    return stored.float() * scale, {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def fp8_rows(out: int, width: int) -> Stored:
    stored, scale = fp8(out, width), scales(out, 1)
    return stored.float() * scale, {"weight": stored, "weight_scale": scale}


def fp8_groups(out: int, width: int, *, sides: tuple[int, int] = (128, 128), name: str = "weight_scale") -> Stored:
    """With one scale for `sides` rows and columns; the last blocks may be partial."""
    stored, each = fp8(out, width), scales(-(-out // sides[0]), -(-width // sides[1]))
    of_weights = each.repeat_interleave(sides[0], 0)[:out].repeat_interleave(sides[1], 1)[:, :width]
    return stored.float() * of_weights, {"weight": stored, name: each}


def exponents(out: int, groups: int) -> Tensor:
    """E8M0: powers of 2, plus 127, that make weights of the usual size."""
    return torch.randint(116, 122, (out, groups), dtype=torch.uint8)


def mxfp4(out: int, width: int) -> Stored:
    """Of two neighbours the first is in the lower half of a byte."""
    codes, exponent = numbers(out, width, 0, 16), exponents(out, width // 32)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * torch.where(codes < 8, 1, -1)
    bytes_ = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    weight = values * 2.0 ** (exponent.float() - 127).repeat_interleave(32, 1)
    return weight, {"weight_packed": bytes_, "weight_scale": exponent}


def mxfp8(out: int, width: int) -> Stored:
    stored, exponent = fp8(out, width), exponents(out, width // 32) - 2
    return stored.float() * 2.0 ** (exponent.float() - 127).repeat_interleave(32, 1), {
        "weight": stored,
        "weight_scale": exponent,
    }


def int8_rows(out: int, width: int) -> Stored:
    stored, scale, zero = numbers(out, width, -128, 128).to(torch.int8), scales(out, 1) / 8, numbers(out, 1, -9, 9)
    weight = (stored.float() - zero) * scale
    return weight, {"weight": stored, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def packed(table: Tensor, bits: int = 4) -> Tensor:
    """Rows of unsigned numbers, packed in 32 bits each, lowest bits first."""
    per_integer = 32 // bits
    padded = F.pad(table.long(), (0, -table.shape[1] % per_integer)).unflatten(1, (-1, per_integer))
    return (padded << bits * torch.arange(per_integer)).sum(-1).to(torch.int32)


def dequantised(weight: Tensor, zero: Tensor, scale: Tensor, groups: Tensor | None = None) -> Tensor:
    """[out, in], and by group [out, groups] twice; `groups`: of each column."""
    width = weight.shape[1]
    groups = torch.arange(width) // (width // scale.shape[1]) if groups is None else groups
    return (weight - zero[:, groups]) * scale[:, groups]


def integers_packed(out: int, width: int, *, bits: int = 4, asymmetric: bool = False, group: int = GROUP) -> Stored:
    weight, scale = numbers(out, width, 0, 2**bits), scales(out, width // group) / 2 ** (bits - 4)
    middle = 2 ** (bits - 1)
    zero = middle + (numbers(out, width // group, -3, 3) if asymmetric else torch.zeros(out, width // group).int())
    parts = {"weight_packed": packed(weight, bits), "weight_scale": scale, "weight_shape": torch.tensor([out, width])}
    if asymmetric:
        parts["weight_zero_point"] = packed(zero.T, bits).T.contiguous()
    return dequantised(weight, zero, scale), parts


def awq(out: int, width: int, *, group: int = GROUP) -> Stored:
    weight, zero, scale = numbers(out, width, 0, 16), numbers(out, width // group, 0, 16), scales(out, width // group)
    order = [8 * at + i for at in range(out // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]  # of eight the even ones first
    parts = {"qweight": packed(weight.T[:, order]), "qzeros": packed(zero.T[:, order]), "scales": scale.T.contiguous()}
    return dequantised(weight, zero, scale), parts


def gptq(out: int, width: int, *, bits: int = 4, less: int = 1, group: int = GROUP, in_order: bool = False) -> Stored:
    """Ordered by activation unless `in_order`: each column has its group's index. `less`: what is subtracted from
    stored zero points."""
    weight = numbers(out, width, 0, 2**bits)
    zero, scale = numbers(out, width // group, 1, 2**bits), scales(out, width // group) / 2 ** (bits - 4)
    groups = (torch.arange(width) if in_order else torch.randperm(width)) // group
    parts = {"qweight": packed(weight, bits).T.contiguous(), "qzeros": packed((zero - less).T, bits)}
    parts |= {"scales": scale.T.contiguous(), "g_idx": groups.to(torch.int32)}
    return dequantised(weight, zero, scale, groups), parts


def int8_symmetric(out: int, width: int) -> Stored:
    stored, scale = numbers(out, width, -128, 128).to(torch.int8), scales(out, 1) / 8
    return stored.float() * scale, {"weight": stored, "weight_scale": scale}


def compressed(form: str, bits: int, kind: str = "int", **more: object) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FORMATS: dict[str, tuple[Callable[[int, int], Stored], dict[str, Any]]] = {
    "fp8-blocks": (
        partial(fp8_groups, sides=(48, 48), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
    ),
    "fp8-whole": (fp8_whole, {"quant_method": "fp8"}),
    "modelopt": (fp8_whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt, older": (fp8_whole, {}),
    "float-quantized": (fp8_rows, compressed("float-quantized", 8, "float")),
    "float-quantized 48": (
        partial(fp8_groups, sides=(48, 48)),
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[48, 48]),
    ),
    "mxfp4-pack-quantized": (mxfp4, compressed("mxfp4-pack-quantized", 4, "float", group_size=32)),
    "mxfp8-quantized": (mxfp8, compressed("mxfp8-quantized", 8, "float", group_size=32)),
    "int-quantized": (int8_rows, compressed("int-quantized", 8)),
    "pack-quantized": (integers_packed, compressed("pack-quantized", 4)),
    "pack-quantized-zeros": (partial(integers_packed, asymmetric=True), compressed("pack-quantized", 4)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq_v2": (
        partial(gptq, bits=8, less=0),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
}

IN_ORDER = {"quant_method": "gptq", "bits": 4, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "data_type": "int", "autoround_version": "0.16.1"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
INTEGERS: dict[str, tuple[Callable[[int, int], Stored], dict[str, Any]]] = {
    **{name: FORMATS[name] for name in ("int-quantized", "pack-quantized", "pack-quantized-zeros", "awq")},
    "int8 by row": (int8_symmetric, compressed("int-quantized", 8)),
    "pack-quantized 128": (partial(integers_packed, group=128), compressed("pack-quantized", 4)),
    "pack-quantized-zeros 128": (partial(integers_packed, group=128, asymmetric=True), compressed("pack-quantized", 4)),
    "awq 128": (partial(awq, group=128), AWQ),
    "gptq 32": (partial(gptq, in_order=True), IN_ORDER),
    "gptq 128": (partial(gptq, in_order=True, group=128), IN_ORDER),
    "auto-round": (partial(gptq, in_order=True, less=0), {**AUTO_ROUND, "packing_format": "auto_round"}),
    "auto-round gptq": (partial(gptq, in_order=True), {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}),
    "auto-round awq": (awq, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
    "gptq_v2 8 bits": (
        partial(gptq, in_order=True, bits=8, less=0),
        {**IN_ORDER, "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "gptq_v2 2 bits": (
        partial(gptq, in_order=True, bits=2, less=0, group=64),
        {**IN_ORDER, "bits": 2, "checkpoint_format": "gptq_v2"},
    ),
}
"""Those whose integers stay packed."""
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOATS: dict[str, tuple[Callable[[int, int], Stored], dict[str, Any]]] = {
    **{name: FORMATS[name] for name in ("fp8-whole", "modelopt", "float-quantized", "mxfp4-pack-quantized")},
    "fp8-blocks 128": (partial(fp8_groups, name="weight_scale_inv"), DEEPSEEK),
    "float-quantized 128": (
        fp8_groups,
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[128, 128]),
    ),
    "float-quantized group": (
        partial(fp8_groups, sides=(1, 128)),
        compressed("float-quantized", 8, "float", strategy="group", group_size=128),
    ),
}
"""Those whose floats of 8 and 4 bits stay packed."""
PACKED = INTEGERS | FLOATS


def quantise(folder: Path, form: str) -> dict[str, Tensor]:
    """Quantise every projection of a checkpoint. Returns the weights that it stands for, by name."""
    torch.manual_seed(8)
    make, settings = (FORMATS | PACKED)[form]
    meant = quantise_weights(folder, {"_proj.weight": make})
    if settings:
        change_config(folder, quantization_config=settings)
    else:  # in a file of its own; transformers loads such a checkpoint without scales
        algorithms = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
        own = {"producer": {"name": "modelopt"}, "quantization": algorithms}
        (folder / "hf_quant_config.json").write_text(json.dumps(own))
    return meant


def quantise_weights(folder: Path, makers: Mapping[str, Callable[[int, int], Stored]]) -> dict[str, Tensor]:
    """Quantise weights by how their names end. Returns all weights that the checkpoint stands for, by name."""
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        make = next((make for ending, make in makers.items() if name.endswith(ending)), None)
        if make is None:
            stored[name] = meant[name] = weight
            continue
        meant[name], parts = make(*weight.shape)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    change_weights(folder, lambda _: stored)
    return meant
