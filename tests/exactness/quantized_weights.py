"""Random matrices in GGUF's blocks, and of integers and numbers of e4m3 by group."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch

from paceline.gguf.gguf_file import BLOCK_TYPES, BlockType
from paceline.model.layer_weights import QuantizedWeight
from paceline.model.packed_floats import floats
from paceline.model.packed_integers import INT4, INT4_SMALL, INT4_ZEROS, INT8, INT8_SMALL, IntegerMatrix

PACKED_TYPES = {block.name: block for block in BLOCK_TYPES.values() if block.is_packed}
HALVES = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "MXFP4": []} | {
    name: [0, 2] for name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1")
}
"""Where a block has 16-bit factors; else at its beginning."""
EXPONENT = {"MXFP4": 0}
"""Where it has an exponent of 8 bits."""


def random_blocks(block: BlockType, rows: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Any codes, with factors of plausible size and both signs: [rows, bytes of a row]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, width // block.size, block.bytes), dtype=np.uint8)
    for at in HALVES.get(block.name, [0]):
        factors = (0.01 * rng.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = factors[..., None].view(np.uint8)
    if (exponent := EXPONENT.get(block.name)) is not None:
        blocks[:, :, exponent] = rng.integers(112, 128, blocks.shape[:2])
        blocks[0, :3, exponent] = 0, 1, 2  # the smallest are denormal floats
    return np.ascontiguousarray(blocks.reshape(rows, -1))


def random_weight(block: BlockType, rows: int, width: int, seed: int = 0) -> QuantizedWeight:
    return QuantizedWeight(block.number, (rows, width), random_blocks(block, rows, width, seed))


def numbers_of(weight: QuantizedWeight) -> npt.NDArray[np.float32]:
    """By the package `gguf`."""
    numbers: npt.NDArray[np.float32] = gguf.quants.dequantize(weight.data, gguf.GGMLQuantizationType(weight.type))
    return numbers


class IntegerKind(NamedTuple):
    """Integers by group, and the block type that they become."""

    type: int
    bits: int
    group: int
    width: int
    has_zeros: bool


INTEGER_TYPES = {
    "INT4": IntegerKind(INT4, 4, 128, 640, has_zeros=False),
    "INT4_ROW": IntegerKind(INT4, 4, 544, 544, has_zeros=False),
    "INT4_ZEROS": IntegerKind(INT4_ZEROS, 4, 128, 640, has_zeros=True),
    "INT4_SMALL": IntegerKind(INT4_SMALL, 4, 32, 544, has_zeros=True),
    "INT4_64": IntegerKind(INT4_SMALL, 4, 64, 576, has_zeros=False),
    "INT8": IntegerKind(INT8, 8, 544, 544, has_zeros=False),
    "INT8_SMALL": IntegerKind(INT8_SMALL, 8, 32, 544, has_zeros=True),
}


def random_integers(kind: IntegerKind, rows: int) -> IntegerMatrix:
    """Any codes and zeros, with scales that half precision does not have."""
    groups, top = kind.width // kind.group, 2**kind.bits
    random = torch.Generator().manual_seed(4)
    zeros = torch.randint(0, top, (rows, groups), generator=random, dtype=torch.uint8)
    return IntegerMatrix(
        kind.bits,
        torch.randint(0, top, (rows, kind.width), generator=random, dtype=torch.uint8),
        0.01 * torch.randn(rows, groups, generator=random),
        zeros if kind.has_zeros else torch.full_like(zeros, top // 2),
    )


def meant_integers(matrix: IntegerMatrix) -> npt.NDArray[np.float32]:
    """(code - zero) * scale, in float32."""
    groups = torch.arange(matrix.codes.shape[1]) // matrix.group
    numbers = (matrix.codes.float() - matrix.zeros.float()[:, groups]) * matrix.scales[:, groups]
    return np.asarray(numbers.numpy(), dtype=np.float32)


E4M3_WIDTHS = {"E4M3": 640, "E4M3_ROW": 544}
"""The second has one scale for a row, whose last unit is not full."""


def random_float8(name: str, rows: int) -> tuple[QuantizedWeight, npt.NDArray[np.float32]]:
    """Every number but NaN, with scales of both signs; and the matrix that is meant, in float32."""
    width, random = E4M3_WIDTHS[name], torch.Generator().manual_seed(5)
    codes = torch.randint(0, 254, (rows, width), generator=random)
    weight = (codes + (codes > 126)).to(torch.uint8).view(torch.float8_e4m3fn)  # 127 and 255 are NaN
    scale = 0.01 * torch.randn(rows, width // 128 if name == "E4M3" else 1, generator=random)
    found = floats({"weight": weight, "weight_scale": scale}.get, {})
    assert found is not None
    meant = weight.float() * scale.repeat_interleave(width // scale.shape[1], 1)
    return found, np.asarray(meant.numpy(), dtype=np.float32)
