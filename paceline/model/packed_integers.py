"""Integers of 4 or 8 bits with a float32 scale and a zero by group, in native code's blocks.

AWQ, GPTQ and compressed-tensors have scales in float16, bfloat16 or float32, by groups of any number of inputs: GGUF's
blocks, with a half-precision scale for each 32, do not hold them all. A block of our own has the bytes

    float32 scale · zero, uint8 · 32 codes of 8 bits, or 16 bytes of which byte i has code i and, above it, code i + 16

and is worth (code - zero) * scale. Nothing is rounded. Native code keeps a scale once per 128 inputs
where groups allow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight

BLOCK, UNIT = 32, 128
INT4, INT4_ZEROS, INT8, INT4_SMALL, INT8_SMALL = 1000, 1001, 1002, 1003, 1004
"""`BlockType` of blocks.hpp. INT4 and INT8 have zeros in the middle, 8 and 128; SMALL: groups of less than UNIT."""
CHUNK = 1 << 20
"""Numbers that are packed at a time."""


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A matrix [out, in] of (code - zero) * scale."""

    bits: int
    """Of a code: at most 4, or 8."""
    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float32 [out, groups of neighbouring inputs]."""
    zeros: Tensor
    """uint8 [out, groups]."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def is_packable(self) -> bool:
        """Whether groups are whole blocks."""
        (_, width), (_, groups) = self.codes.shape, self.scales.shape
        return width % BLOCK == 0 and width % groups == 0 and self.group % BLOCK == 0

    @property
    def type(self) -> int:
        """The block type that holds it."""
        if self.scales.shape[1] > 1 and self.group % UNIT:
            return INT4_SMALL if self.bits <= 4 else INT8_SMALL
        centred = bool((self.zeros == (8 if self.bits <= 4 else 128)).all())
        if self.bits <= 4:
            return INT4 if centred else INT4_ZEROS
        return INT8 if centred else INT8_SMALL

    def packed(self) -> QuantizedWeight:
        """In blocks. Only if `is_packable`."""
        rows, width = self.codes.shape
        groups = torch.arange(0, width, BLOCK) // self.group
        data = np.empty((rows, block_bytes(self.bits) * (width // BLOCK)), dtype=np.uint8)
        step = max(1, CHUNK // width)
        for start in range(0, rows, step):
            data[start : start + step] = self._blocks(slice(start, start + step), groups)
        return QuantizedWeight(self.type, (rows, width), data)

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
