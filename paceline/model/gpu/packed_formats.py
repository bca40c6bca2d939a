"""Quantised matrices in a GPU's memory: codes and scales in planes, which kernels turn into numbers in registers.

A matrix [out, in] has units of 256 inputs, which are eight blocks of 32. A word j of b bytes has the codes of b bits of
a unit's inputs j, j + 32, ..., j + 224, the first in its lowest bits. So a plane of words holds codes of 1, 2, 4 or 8
bits, and a program reads adjacent words. Codes of 3, 5 and 6 bits have a plane of their lower bits and one of their
upper ones. Scales of neighbouring outputs are adjacent.

A number is (value of the code - zero) * scale - minimum, in float32. In formats with two levels of scales, scale and
minimum are those of the unit times small integers of each block of 32 inputs, or of each half of one.

Shapes: N outputs, U units, B blocks as a file has them, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.model.packed_floats import E4M3
from paceline.model.packed_integers import BLOCK, INT4, INT4_SMALL, INT4_ZEROS, INT8, INT8_SMALL

CODES_PER_WORD = 8
UNIT = BLOCK * CODES_PER_WORD
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bits of a code."""
Values = Literal["integer", "e4m3", "e2m1", "iq4"]


class BlockParts(NamedTuple):
    """Blocks of some outputs, taken apart. Codes are uint8 [N, B, inputs of a block], all else is [N, B] or
    [N, B, numbers of a block]."""

    codes: Tensor
    scales: Tensor
    """float16 or float32; uint8: exponents of e8m0."""
    small_scales: Tensor | None = None
    """int8."""
    minimums: Tensor | None = None
    """float16, with the dimensions of `scales`."""
    small_minimums: Tensor | None = None
    """uint8, with the dimensions of `small_scales`."""
    zeros: Tensor | None = None
    """uint8, with the dimensions of `scales`."""


@dataclass(frozen=True, slots=True)
class Format:
    """A block type. It is read from bytes, uint8 [N, B, bytes of a block]."""

    read: Callable[[Tensor], BlockParts]
    bits: int
    """Of a code, the lower ones."""
    upper_bits: int = 0
    values: Values = "integer"
    """Of codes."""
    zero: int = 0
    """What is subtracted from a code, if zeros are not stored."""
    small: int = 0
    """Inputs that share small integers; 0: scales have one level."""


@dataclass(frozen=True, slots=True)
class Planes:
    """A matrix [out, in] on a device. `dtype`: of its products, and of rows of it."""

    format: Format
    shape: tuple[int, int]
    group: int
    """Neighbouring inputs that share a scale."""
    dtype: torch.dtype
    codes: Tensor
    """[U, N, BLOCK], one of WORDS."""
    upper: Tensor | None
    """Upper bits of codes, as `codes`."""
    scales: Tensor
    """[G, N], as in `BlockParts`, and so are the others."""
    small_scales: Tensor | None
    minimums: Tensor | None
    small_minimums: Tensor | None
    zeros: Tensor | None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def planes(self) -> Mapping[str, Tensor]:
        """All tensors, by field."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """The lower halves of bytes, then the upper halves."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _bits(raw: Tensor, bits: int, *, strips: int = 1) -> Tensor:
    """Codes of 1 or 2 bits: of each strip of bytes the lowest bits of all, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).unsqueeze(1)
    codes: Tensor = raw.unflatten(-1, (strips, 1, -1)) >> shifts & (2**bits - 1)
    return codes.flatten(-3)


def _fifth_bits(raw: Tensor) -> Tensor:
    """32 bits of 4 bytes, each a code's fifth."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return (raw.unsqueeze(-1) >> shifts & 1).flatten(-2) << 4


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 12 bytes."""
    low, high, rest = raw.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], -1)
    return scales.view(torch.int8), torch.cat([high & 63, rest >> 4 | high >> 6 << 4], -1)


def _q4_0(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 4:]), _half(raw, 0), minimums=-_half(raw, 2))


def _q5_0(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6]), _half(raw, 0))


def _q5_1(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), _half(raw, 0), minimums=-_half(raw, 2))


def _q8_0(raw: Tensor) -> BlockParts:
    return BlockParts(raw[..., 2:] ^ 128, _half(raw, 0))


def _q2_k(raw: Tensor) -> BlockParts:
    small = raw[..., :16]
    return BlockParts(
        _bits(raw[..., 16:80], 2, strips=2), _half(raw, 80), (small & 15).view(torch.int8), _half(raw, 82), small >> 4
    )


def _q3_k(raw: Tensor) -> BlockParts:
    codes = _bits(raw[..., 32:96], 2, strips=2) | _bits(raw[..., :32], 1) << 2
    small = _nibbles(raw[..., 96:104]) | _bits(raw[..., 104:108], 2) << 4
    return BlockParts(codes, _half(raw, 108), (small - 32).view(torch.int8))


def _q4_k(raw: Tensor) -> BlockParts:
    scales, minimums = _six_bits(raw[..., 4:16])
    codes = _nibbles(raw[..., 16:].unflatten(-1, (4, -1))).flatten(-2)
    return BlockParts(codes, _half(raw, 0), scales, _half(raw, 2), minimums)


def _q5_k(raw: Tensor) -> BlockParts:
    scales, minimums = _six_bits(raw[..., 4:16])
    codes = _nibbles(raw[..., 48:].unflatten(-1, (4, -1))).flatten(-2) | _bits(raw[..., 16:48], 1) << 4
    return BlockParts(codes, _half(raw, 0), scales, _half(raw, 2), minimums)


def _q6_k(raw: Tensor) -> BlockParts:
    codes = _nibbles(raw[..., :128].unflatten(-1, (2, -1))).flatten(-2) | _bits(raw[..., 128:192], 2, strips=2) << 4
    return BlockParts(codes, _half(raw, 208), raw[..., 192:208].contiguous().view(torch.int8))


def _iq4_xs(raw: Tensor) -> BlockParts:
    low = torch.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], -1).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = (raw[..., 2:4].unsqueeze(-1) >> shifts & 3).flatten(-2)
    codes = _nibbles(raw[..., 8:].unflatten(-1, (8, -1))).flatten(-2)
    return BlockParts(codes, _half(raw, 0), ((low | high << 4) - 32).view(torch.int8))


def _mxfp4(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 1:]), raw[..., 0])


def _float(raw: Tensor) -> Tensor:
    """The float32 at the beginning of each block."""
    return raw[..., :4].contiguous().view(torch.float32).squeeze(-1)


def _int4(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 5:]), _float(raw))


def _int4_zeros(raw: Tensor) -> BlockParts:
    return BlockParts(_nibbles(raw[..., 5:]), _float(raw), zeros=raw[..., 4])


def _int8(raw: Tensor) -> BlockParts:
    return BlockParts(raw[..., 5:], _float(raw))


def _int8_zeros(raw: Tensor) -> BlockParts:
    return BlockParts(raw[..., 5:], _float(raw), zeros=raw[..., 4])


def _e4m3(raw: Tensor) -> BlockParts:
    return BlockParts(raw[..., 4:], _float(raw))


FORMATS: Mapping[int, Format] = {
    **{2: Format(_q4_0, 4, zero=8), 3: Format(_q4_1, 4)},
    **{6: Format(_q5_0, 4, 1, zero=16), 7: Format(_q5_1, 4, 1), 8: Format(_q8_0, 8, zero=128)},
    **{10: Format(_q2_k, 2, small=16), 11: Format(_q3_k, 2, 1, zero=4, small=16)},
    **{12: Format(_q4_k, 4, small=32), 13: Format(_q5_k, 4, 1, small=32), 14: Format(_q6_k, 4, 2, zero=32, small=16)},
    **{20: Format(_q4_0, 4, values="iq4"), 23: Format(_iq4_xs, 4, values="iq4", small=32)},
    39: Format(_mxfp4, 4, values="e2m1"),
    **{INT4: Format(_int4, 4, zero=8), INT4_ZEROS: Format(_int4_zeros, 4), INT4_SMALL: Format(_int4_zeros, 4)},
    **{INT8: Format(_int8, 8, zero=128), INT8_SMALL: Format(_int8_zeros, 8), E4M3: Format(_e4m3, 8, values="e4m3")},
}
"""By type: GGUF's number, or one of ours."""
