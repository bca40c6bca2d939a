"""Convolutions along the positions of a draft block, around attention and MLP of a DFlash2 layer.

After speculators 0.9.0 (`models/dflash2/model_definitions.py`, which names z-lab's dflash at 07ebd93). With x_p the
input of position p of a block and · by channel, channels in groups that share the dynamic part of a coefficient:

    d_p = projection x_p                           two kernels of K taps: one before the part, one after it
    y_p = sum over taps t of (base_t + d_p,t) · x_(p-t)        positions before the block count as 0
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import CheckpointError
from paceline.model.layers import Linear


class BlockConvolution:
    """The convolutions before and after one part of a layer."""

    def __init__(self, weights: HeadWeights, name: str, h: int, block: int) -> None:
        """`block`: its positions. Raises `CheckpointError` if the tensors below `name` do not fit."""
        base, projection = f"{name}.base_kernel", f"{name}.kernel_projection.weight"
        _, self._taps, _ = weights.shape(base)
        self._groups, rest = divmod(weights.shape(projection)[0], 2 * self._taps)
        if rest or not self._groups or h % self._groups or self._taps > block:
            raise CheckpointError(
                f"{base} and {projection} have shapes {list(weights.shape(base))} and "
                f"{list(weights.shape(projection))}: they give no conv_kernel_size up to {block} and no "
                f"conv_group_size that divides {h}"
            )
        self._base = weights.take(base, 2, self._taps, h).unflatten(-1, (self._groups, -1))
        self._projection = Linear(weights.take(projection, 2 * self._taps * self._groups, h))
        self._block = block

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The part between both convolutions. x [blocks * positions, h] → the same shape."""
        dynamic = self._projection(x).unflatten(-1, (2, self._taps, self._groups)).unsqueeze(-1)
        before, after = (dynamic + self._base).unbind(1)
        return self._convolved(part(self._convolved(x, before)), after)

    def _convolved(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """`coefficients` [blocks * positions, taps, groups, channels of a group]."""
        blocks = x.unflatten(-1, (self._groups, -1)).unflatten(0, (-1, self._block))
        shifted = (F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, : self._block] for tap in range(self._taps))
        terms = (each.flatten(0, 1) * by_tap for each, by_tap in zip(shifted, coefficients.unbind(1), strict=True))
        return sum(terms, start=x.new_zeros(())).flatten(1)
