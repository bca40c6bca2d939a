"""Integers of at most 8 bits with scales and zeros by group: AWQ, GPTQ and compressed-tensors.

A checkpoint's codes are read as an `IntegerMatrix`, which becomes floats, or native code's blocks.

Scales are in float16, bfloat16 or float32, by groups of any number of inputs: GGUF's blocks, with a half-precision
scale for each 32, do not hold them all. A block of our own has the bytes

    float32 scale · zero, uint8 · 32 codes of 8 bits, or 16 bytes of which byte i has code i and, above it, code i + 16

and is worth (code - zero) * scale. Nothing is rounded. Native code keeps a scale once per 128 inputs
where groups allow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight

ReadTensor = Callable[[str], Tensor | None]
"""Reads a module's tensor by the last part of its name; None if there is none."""
Settings = Mapping[str, Any]
"""`quantization_config` of config.json."""

BLOCK, UNIT = 32, 128
INT4, INT4_ZEROS, INT8, INT4_SMALL, INT8_SMALL = 1000, 1001, 1002, 1003, 1004
"""`BlockType` of blocks.hpp. INT4 and INT8 have zeros in the middle, 8 and 128; SMALL: groups of less than UNIT."""
CHUNK = 1 << 20
"""Numbers that are packed at a time."""

GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AUTO_ROUND_PACKINGS: Mapping[str, Settings] = {
    "auto_round": GPTQ_V2,
    "auto_round:gptqmodel": GPTQ_V2,
    "auto_round:auto_gptq": {"quant_method": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
"""By `packing_format`, settings with the same tensors. auto-round's own packing is GPTQ's second format."""
PACKED_BITS = (1, 2, 4, 8)
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index within a 32-bit word of each of eight neighbouring columns."""
INT32_BITS = 32


class MissingTensorError(Exception):
    """A module lacks a tensor."""


class PackedShapeError(Exception):
    """A module's tensors do not fit each other."""


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A matrix [out, in] of (code - zero) * scale."""

    bits: int
    """Of a code: at most 4, or 8."""
    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float32 [out, groups]."""
    zeros: Tensor
    """uint8 [out, groups]."""
    group_of: Tensor | None = None
    """Each input's group, integers [in]; None: a group has neighbouring inputs."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return -(-self.codes.shape[1] // self.scales.shape[1])

    @property
    def is_packable(self) -> bool:
        """Whether groups are whole blocks of neighbouring inputs."""
        (_, width), (_, groups) = self.codes.shape, self.scales.shape
        whole = width % BLOCK == 0 and width % groups == 0 and self.group % BLOCK == 0
        return whole and (self.group_of is None or torch.equal(self.group_of.long(), self._neighbours))

    @property
    def type(self) -> int:
        """The block type that holds it."""
        if self.scales.shape[1] > 1 and self.group % UNIT:
            return INT4_SMALL if self.bits <= 4 else INT8_SMALL
        centred = bool((self.zeros == (8 if self.bits <= 4 else 128)).all())
        if self.bits <= 4:
            return INT4 if centred else INT4_ZEROS
        return INT8 if centred else INT8_SMALL

    def numbers(self) -> Tensor:
        """float32 [out, in]."""
        groups = self._neighbours if self.group_of is None else self.group_of.long()
        return (self.codes.float() - self.zeros.float()[:, groups]) * self.scales[:, groups]

    def packed(self) -> QuantizedWeight:
        """In blocks. Only if `is_packable`."""
        rows, width = self.codes.shape
        groups = torch.arange(0, width, BLOCK) // self.group
        data = np.empty((rows, block_bytes(self.bits) * (width // BLOCK)), dtype=np.uint8)
        step = max(1, CHUNK // width)
        for start in range(0, rows, step):
            data[start : start + step] = self._blocks(slice(start, start + step), groups)
        return QuantizedWeight(self.type, (rows, width), data)

    @property
    def _neighbours(self) -> Tensor:
        """Each input's group, where a group has neighbouring inputs."""
        return torch.arange(self.codes.shape[1]) // self.group

    def _blocks(self, rows: slice, groups: Tensor) -> npt.NDArray[np.uint8]:
        """Rows in blocks: [rows, bytes]. `groups`: of each block."""
        codes = self.codes[rows].unflatten(1, (-1, BLOCK))
        if self.bits <= 4:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        scales = self.scales[rows][:, groups].unsqueeze(-1).contiguous().view(torch.uint8)
        blocks = torch.cat([scales, self.zeros[rows][:, groups].unsqueeze(-1), codes], dim=-1)
        packed: npt.NDArray[np.uint8] = blocks.flatten(1).numpy()
        return packed


def block_bytes(bits: int) -> int:
    """Of a block."""
    return 5 + (BLOCK // 2 if bits <= 4 else BLOCK)


def are_integers(parts: Collection[str], settings: Settings) -> bool:
    """Whether a module that is stored as these tensors, by the last parts of their names, has integers, not floats."""
    if "weight" not in parts:
        return "qweight" in parts or "weight_shape" in parts
    return any(group.get("type", "int") == "int" for group in weight_groups(settings) if group["num_bits"] == 8)


def weight_groups(settings: Settings) -> list[Mapping[str, Any]]:
    """compressed-tensors' settings for weights, of its groups of modules. Some groups are of activations alone."""
    return [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]


def integers(part: ReadTensor, settings: Settings) -> QuantizedWeight | None:
    """Of the module whose tensors `part` reads; None if it has other numbers, or its groups are not of neighbouring
    inputs, or not whole blocks.

    Raises `MissingTensorError`.
    """
    read = FORMATS.get(str(settings["quant_method"]))
    matrix = None if read is None else read(part, settings)
    return matrix.packed() if matrix is not None and matrix.is_packable else None


def integer_numbers(part: ReadTensor, settings: Settings) -> Tensor:
    """The same module's weight, float32 [out, in]. It has integers in words of 32 bits."""
    matrix = FORMATS[str(settings["quant_method"])](part, settings)
    assert matrix is not None
    return matrix.numbers()


def _awq(part: ReadTensor, settings: Settings) -> IntegerMatrix:
    scales = needed(part, "scales").float().T.contiguous()
    bits, columns = packed_bits(needed(part, "qzeros"), len(scales)), torch.tensor(AWQ_COLUMNS)

    def ordered(name: str) -> Tensor:
        numbers = unpacked(needed(part, name), bits, 1).to(torch.uint8).unflatten(1, (-1, len(columns)))
        result: Tensor = numbers[:, :, columns].flatten(1).T.contiguous()
        return result

    return IntegerMatrix(bits, ordered("qweight"), scales, ordered("qzeros"))


def _gptq(part: ReadTensor, settings: Settings) -> IntegerMatrix:
    """All but GPTQModel's second format store zeros less 1."""
    scales, packed_zeros = needed(part, "scales").float().T.contiguous(), needed(part, "qzeros")
    bits = packed_bits(packed_zeros, len(scales))
    codes = unpacked(needed(part, "qweight"), bits, 0).to(torch.uint8).T.contiguous()
    zeros = unpacked(packed_zeros, bits, 1)
    zeros = zeros if settings.get("checkpoint_format", "gptq") == "gptq_v2" else (zeros + 1) & (2**bits - 1)
    return IntegerMatrix(bits, codes, scales, zeros.to(torch.uint8).T.contiguous(), part("g_idx"))


def _compressed(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    weight = part("weight_packed")
    if weight is None:
        return _eight_bits(part)
    if weight.dtype != torch.int32:
        return None
    rows, width = (int(size) for size in needed(part, "weight_shape").tolist())
    bits = packed_bits(weight, width)
    codes = unpacked(weight, bits, 1)[:rows, :width].to(torch.uint8).contiguous()
    scales = needed(part, "weight_scale").float()
    scales = scales.expand(rows, 1) if scales.numel() == 1 else scales.reshape(rows, -1)
    return IntegerMatrix(bits, codes, scales, _zeros(part, scales, bits), part("weight_g_idx"))


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
    return (codes.expand_as(scales) if codes.numel() == 1 else codes.reshape(scales.shape)).to(torch.uint8)


def _auto_round(part: ReadTensor, settings: Settings) -> IntegerMatrix | None:
    equal = AUTO_ROUND_PACKINGS[settings["packing_format"]]
    return FORMATS[equal["quant_method"]](part, equal)


FORMATS: Mapping[str, Callable[[ReadTensor, Settings], IntegerMatrix | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "auto-round": _auto_round,
}
"""By `quant_method`."""


def needed(part: ReadTensor, name: str) -> Tensor:
    """Raises `MissingTensorError` if there is none."""
    tensor = part(name)
    if tensor is None:
        raise MissingTensorError(name)
    return tensor


def packed_bits(packed: Tensor, numbers: int) -> int:
    """Of a number, where int32 words along the last axis hold so many: modules of a checkpoint may differ.

    Raises `PackedShapeError`.
    """
    words = packed.shape[-1]
    if fitting := [bits for bits in PACKED_BITS if math.ceil(numbers * bits / INT32_BITS) == words]:
        return fitting[-1]
    raise PackedShapeError(f"has {numbers} numbers in {words} words of 32 bits")


def unpacked(packed: Tensor, bits: int, axis: int) -> Tensor:
    """The numbers packed in int32 words, lowest bits first: int32, `INT32_BITS / bits` times as many along `axis`."""
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    numbers = (packed.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (packed.dim() - 1 - axis))) & (2**bits - 1)
    joined: Tensor = numbers.flatten(axis, axis + 1)
    return joined
