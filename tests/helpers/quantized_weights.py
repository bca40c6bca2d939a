"""Random matrices in GGUF's blocks."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from paceline.gguf.gguf_file import BLOCK_TYPES, BlockType
from paceline.model.layer_weights import QuantizedWeight

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
