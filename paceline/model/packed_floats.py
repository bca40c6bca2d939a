"""Floats of 8 and 4 bits with scales, FP8 and MXFP4, in native code's blocks. Nothing is rounded.

A block of 32 numbers of e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning") has the bytes

    float32 scale · 32 numbers

Native code keeps a scale once per 128 inputs. MXFP4 (OCP Microscaling Formats 1.0) becomes GGUF's block of that name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight
from paceline.model.packed_integers import BLOCK, UNIT, ReadTensor, Settings, needed
from paceline.model.quantization import block_of, scale_of, spread_scales

E4M3, MXFP4 = 1005, 39
"""`BlockType` of blocks.hpp."""
NAN = 0x7F
"""Of e4m3, without its sign: no number of native code's."""


def floats(part: ReadTensor, settings: Settings) -> QuantizedWeight | None:
    """Of the module whose tensors `part` reads; None if it has other numbers, or scales that blocks do not hold.

    Raises `MissingTensorError`.
    """
    packed = part("weight_packed")
    if packed is not None:
        return _mxfp4(packed, needed(part, "weight_scale")) if packed.dtype == torch.uint8 else None
    weight, scale = part("weight"), scale_of(part)
    if weight is None or weight.dtype != torch.float8_e4m3fn or scale is None or part("weight_zero_point") is not None:
        return None
    codes, group = weight.view(torch.uint8), float8_group(scale.shape, weight.shape[1], settings)
    if group is None or bool((codes & NAN == NAN).any()):
        return None
    return _e4m3(codes, scale, block_of(settings), group)


def float8_group(scale: Sequence[int], width: int, settings: Settings) -> int | None:
    """Neighbouring inputs of a row of `width` numbers that share a scale; None if blocks do not hold such scales.

    `scale`: the shape of the weight's scales, as in quantization.py.
    """
    columns, block = scale[1] if len(scale) == 2 else 1, block_of(settings)
    of_blocks = block is not None and columns > 1 and -(-width // block[1]) == columns
    group = block[1] if block is not None and of_blocks else -(-width // columns)
    return group if width % BLOCK == 0 and (columns == 1 or group % UNIT == 0) else None


def _e4m3(codes: Tensor, scale: Tensor, block: Sequence[int] | None, group: int) -> QuantizedWeight:
    """`codes`: uint8 [out, in]; `scale`: as in quantization.py, with `group` inputs each."""
    (rows, width), columns = codes.shape, scale.shape[1] if scale.dim() == 2 else 1
    of_rows = spread_scales(scale, (rows, columns), None if block is None else (block[0], 1)).expand(rows, columns)
    of_blocks = of_rows[:, torch.arange(0, width, BLOCK) // group].unsqueeze(-1).contiguous().view(torch.uint8)
    return _weight(E4M3, of_blocks, codes.unflatten(1, (-1, BLOCK)))


def _mxfp4(packed: Tensor, scale: Tensor) -> QuantizedWeight | None:
    """`packed`: uint8 [out, in / 2], of two neighbours the first in the lower half; `scale`: uint8 [out, in / 32]."""
    if packed.shape[1] != BLOCK // 2 * scale.shape[1]:
        return None
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(len(packed), -1, 2, BLOCK // 2)
    return _weight(MXFP4, scale.unsqueeze(-1), codes[:, :, 0] | codes[:, :, 1] << 4)


def _weight(kind: int, scales: Tensor, codes: Tensor) -> QuantizedWeight:
    """Of scales [out, blocks, bytes] and codes [out, blocks, bytes], uint8."""
    data = torch.cat([scales, codes], dim=-1).flatten(1).numpy()
    return QuantizedWeight(kind, (len(data), scales.shape[1] * BLOCK), data)
