"""The integers of AWQ, GPTQ and compressed-tensors as `IntegerMatrix`: a checkpoint's codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight
from paceline.model.packed_integers import IntegerMatrix
from paceline.model.quantization import (
    AWQ_COLUMNS,
    ReadTensor,
    Settings,
    auto_round_equal,
    gptq_zeros,
    needed,
    packed_bits,
    unpacked,
    weight_groups,
)

ReadMatrix = Callable[[ReadTensor, Settings], IntegerMatrix | None]


def are_integers(parts: Collection[str], settings: Settings) -> bool:
    """Whether a module that is stored as these tensors, by the last parts of their names, has integers, not floats."""
    if "weight" not in parts:
        return "qweight" in parts or "weight_shape" in parts
    return any(group.get("type", "int") == "int" for group in weight_groups(settings) if group["num_bits"] == 8)


def integers(part: ReadTensor, settings: Settings) -> QuantizedWeight | None:
    """Of the module whose tensors `part` reads; None if it has other numbers, or its groups are not of neighbouring
    inputs, or not whole blocks.

    Raises `MissingTensorError`.
    """
    read = FORMATS.get(str(settings["quant_method"]))
    matrix = None if read is None else read(part, settings)
    return matrix.packed() if matrix is not None and matrix.is_packable else None


def _awq(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    scales = needed(part, "scales").float().T.contiguous()
    bits, columns = packed_bits(needed(part, "qzeros"), len(scales)), torch.tensor(AWQ_COLUMNS)

    def ordered(name: str) -> Tensor:
        numbers = unpacked(needed(part, name), bits, 1).to(torch.uint8).unflatten(1, (-1, len(columns)))
        result: Tensor = numbers[:, :, columns].flatten(1).T.contiguous()
        return result

    return IntegerMatrix(bits, ordered("qweight"), scales, ordered("qzeros"))


def _gptq(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    scales, packed_zeros = needed(part, "scales").float().T.contiguous(), needed(part, "qzeros")
    bits = packed_bits(packed_zeros, len(scales))
    codes = unpacked(needed(part, "qweight"), bits, 0).to(torch.uint8).T.contiguous()
    zeros = gptq_zeros(packed_zeros, bits, settings)
    matrix = IntegerMatrix(bits, codes, scales, zeros.to(torch.uint8).T.contiguous())
    return matrix if _are_neighbours(part("g_idx"), matrix.group) else None


def _compressed(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    weight = part("weight_packed")
    if weight is None:
        return _eight_bits(part)
    if weight.dtype != torch.int32:
        return None
    rows, width = (int(size) for size in needed(part, "weight_shape").tolist())
    bits = packed_bits(weight, width)
    codes = unpacked(weight, bits, 1)[:rows, :width].to(torch.uint8).contiguous()
    scales = needed(part, "weight_scale").float().reshape(rows, -1)
    zeros = _zeros(part, scales, bits)
    matrix = IntegerMatrix(bits, codes, scales, zeros)
    return matrix if _are_neighbours(part("weight_g_idx"), matrix.group) else None


def _eight_bits(part: ReadTensor) -> IntegerMatrix | None:
    """Signed bytes with scales by row or by group; None for other numbers or scales."""
    weight, scale = needed(part, "weight"), part("weight_scale")
    if weight.dtype != torch.int8 or scale is None or scale.numel() % len(weight):
        return None
    scales = scale.float().reshape(len(weight), -1)
    return IntegerMatrix(8, (weight.int() + 128).to(torch.uint8), scales, _zeros(part, scales, 8))


def _zeros(part: ReadTensor, scales: Tensor, bits: int) -> Tensor:
    """Zeros in codes, which are signed numbers plus half their range: uint8 as `scales`."""
    zeros, offset = part("weight_zero_point"), 2 ** (bits - 1)
    if zeros is None:
        return torch.full_like(scales, offset, dtype=torch.uint8)
    codes = unpacked(zeros, bits, 0)[: len(scales)] if zeros.dtype == torch.int32 else zeros.int() + offset
    return codes.reshape(scales.shape).to(torch.uint8)


def _are_neighbours(groups: Tensor | None, size: int) -> bool:
    """Whether groups are of `size` neighbouring inputs each. `groups`: of each input, or None."""
    return groups is None or torch.equal(groups.long(), torch.arange(len(groups)) // size)


def _auto_round(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    equal = auto_round_equal(settings)
    return FORMATS[equal["quant_method"]](part, equal)


FORMATS: Mapping[str, ReadMatrix] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "auto-round": _auto_round,
}
"""By `quant_method`."""
