"""Packs matrices of floats into GGUF's block types, `EngineConfig.quantization`.

The package `gguf` packs; Q8_0, which it packs slowly, is packed here by the same formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config.engine_config import Quantization
from paceline.gguf.gguf_file import BLOCK_TYPES, BlockType
from paceline.model.layer_weights import QuantizedWeight

CHUNK = 1 << 20
"""Numbers that are packed at a time: besides the result they need little memory."""
TYPES: Mapping[str, BlockType] = {block.name.lower(): block for block in BLOCK_TYPES.values() if block.is_packed}
BROADEST: Quantization = "q8_0"
"""For an embedding and an output matrix, whatever the layers have: a token's errors there meet no other's."""


def quantized(matrix: Tensor, quantization: Quantization, name: str) -> QuantizedWeight:
    """A matrix [out, in] in blocks. Raises ValueError, which says `name`, if rows are no whole blocks."""
    block, (rows, width) = TYPES[quantization], matrix.shape
    if width % block.size:
        raise ValueError(
            f"{name} has rows of {width} numbers, and {quantization} packs them by {block.size}: "
            "serve this model without quantization"
        )
    data = np.empty((rows, packed_bytes(width, quantization)), dtype=np.uint8)
    step = max(1, CHUNK // width)
    for start in range(0, rows, step):
        data[start : start + step] = _blocks(matrix[start : start + step].detach().float(), block)
    return QuantizedWeight(block.number, (rows, width), data)


def packed_bytes(width: int, quantization: Quantization) -> int:
    """Of a row of `width` numbers, whole blocks."""
    return width // TYPES[quantization].size * TYPES[quantization].bytes


def _blocks(rows: Tensor, block: BlockType) -> npt.NDArray[np.uint8]:
    """Rows in blocks: [rows, bytes]."""
    if block.name == "Q8_0":
        return _q8_0(rows, block)
    from gguf import GGMLQuantizationType  # only quantising takes the package
    from gguf.quants import quantize

    packed: npt.NDArray[np.uint8] = quantize(rows.numpy(), GGMLQuantizationType[block.name])
    return packed


def _q8_0(rows: Tensor, block: BlockType) -> npt.NDArray[np.uint8]:
    """scale = largest magnitude / 127. Codes take its float32 and round half away from 0; blocks have its float16."""
    blocks = rows.unflatten(1, (-1, block.size))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale == 0, 0, 1 / scale)
    codes = _rounded(blocks * inverse).to(torch.int8)
    parts: list[Any] = [scale.half().numpy().view(np.uint8), codes.numpy().view(np.uint8)]
    return np.concatenate(parts, axis=-1).reshape(len(rows), -1)


def _rounded(x: Tensor) -> Tensor:
    """Half away from 0."""
    size = x.abs()
    floor = size.floor()
    rounded: Tensor = x.sign() * (floor + (2 * (size - floor)).floor())
    return rounded
