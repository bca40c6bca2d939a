"""Matrices that stay packed in a GPU's memory, see packed_formats.py: laid out there from blocks in main memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.gguf.gguf_file import BLOCK_TYPES
from paceline.model.gpu.packed_formats import CODES_PER_WORD, FORMATS, UNIT, WORDS, Planes
from paceline.model.layer_weights import QuantizedWeight, Weight
from paceline.model.packed_integers import BLOCK

CHUNK = 1 << 24
"""Numbers that are laid out at a time: besides the result they need little memory."""


@dataclass(frozen=True, slots=True)
class PackedMatrix(Planes):
    """See `paceline.model.layer_weights.PackedWeight`."""

    @classmethod
    def of(cls, weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> PackedMatrix:
        """The same numbers on a device."""
        group, step = _group_of(weight), max(1, CHUNK // weight.shape[1])
        starts = range(0, len(weight), step)
        parts = [_laid_out(weight[start : start + step], group, device, dtype) for start in starts]
        planes: dict[str, Any] = {name: torch.cat([part.planes[name] for part in parts], 1) for name in parts[0].planes}
        return replace(parts[0], shape=weight.shape, **planes)

    def __getitem__(self, rows: slice) -> PackedMatrix:
        """Some rows, in the same memory."""
        planes: dict[str, Any] = {name: plane[:, rows] for name, plane in self.planes.items()}
        return replace(self, shape=(planes["codes"].shape[1], self.shape[1]), **planes)

    def lookup(self, rows: Tensor) -> Tensor:
        """Rows of the matrix: int64 [R] → `dtype` [R, in]."""
        from paceline.model.gpu.packed_products import look_up  # loads Triton

        return look_up(self, rows)

    def product(self, weights: Sequence[Any], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The product with stacked weights, of which this is one; others may be tensors [out, in]. `bias` [out].

        Raises `NativeUnavailableError` if Triton compiles nothing for this device.
        """
        from paceline.model.gpu.packed_products import PackedProduct

        return PackedProduct(joined(weights), bias)


def on_device(weights: Sequence[Weight], device: torch.device, dtype: torch.dtype) -> list[Tensor | PackedMatrix]:
    """Weights of one product. Neighbours of one block type share memory, see `joined`; tensors take `dtype`."""
    placed: list[Tensor | PackedMatrix] = []
    for _, alike in groupby(weights, lambda weight: weight.type if isinstance(weight, QuantizedWeight) else None):
        weights_alike = list(alike)
        packed = [weight for weight in weights_alike if isinstance(weight, QuantizedWeight)]
        placed += [weight.to(device, dtype) for weight in weights_alike if isinstance(weight, Tensor)]
        placed += _placed_together(packed, device, dtype) if packed else []
    return placed


def _placed_together(
    weights: Sequence[QuantizedWeight], device: torch.device, dtype: torch.dtype
) -> Iterator[PackedMatrix]:
    sizes = [len(weight) for weight in weights]
    data = weights[0].data if len(weights) == 1 else np.concatenate([weight.data for weight in weights])
    whole = PackedMatrix.of(QuantizedWeight(weights[0].type, (len(data), weights[0].shape[1]), data), device, dtype)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        yield whole[start:end]


def joined(weights: Sequence[Tensor | PackedMatrix]) -> list[Tensor | PackedMatrix]:
    """The same rows, neighbours in one memory as one matrix."""
    found = [weights[0]]
    for weight in weights[1:]:
        both = _both(found[-1], weight)
        found[-1:] = [found[-1], weight] if both is None else [both]
    return found


def _both(first: Tensor | PackedMatrix, second: Tensor | PackedMatrix) -> PackedMatrix | None:
    """None if the second does not follow the first in its memory."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return None
    end = first.codes.storage_offset() + len(first) * BLOCK
    if first.codes.untyped_storage()._cdata != second.codes.untyped_storage()._cdata or (
        second.codes.storage_offset() != end
    ):
        return None
    outputs = len(first) + len(second)
    planes: dict[str, Any] = {
        name: plane.as_strided((len(plane), outputs, *plane.shape[2:]), plane.stride())
        for name, plane in first.planes.items()
    }
    return replace(first, shape=(outputs, first.shape[1]), **planes)


def _group_of(weight: QuantizedWeight) -> int:
    """A file's block of GGUF has one scale; a block of ours repeats that of its group."""
    if weight.type in BLOCK_TYPES:
        return BLOCK_TYPES[weight.type].size
    blocks = weight.data.reshape(len(weight), weight.shape[1] // BLOCK, -1)
    heads = blocks[:, :, : blocks.shape[2] - BLOCK * FORMATS[weight.type].bits // 8]
    changes = np.flatnonzero((heads[:, 1:] != heads[:, :-1]).any((0, 2))) + 1
    return BLOCK * (math.gcd(*changes.tolist()) or blocks.shape[1])


def _laid_out(weight: QuantizedWeight, group: int, device: torch.device, dtype: torch.dtype) -> PackedMatrix:
    form = FORMATS[weight.type]
    size = BLOCK_TYPES[weight.type].size if weight.type in BLOCK_TYPES else BLOCK
    data = torch.from_numpy(np.array(weight.data)).to(device)  # a copy: a file's bytes are not to be written
    blocks = form.read(data.unflatten(1, (weight.shape[1] // size, -1)))
    codes = blocks.codes.flatten(1)
    units = -(-weight.shape[1] // UNIT)

    def by_output(numbers: Tensor, inputs: int, step: int = 1) -> Tensor:
        """[N, B] or [N, B, numbers] → [numbers that a row of whole units has, N]: one for so many inputs."""
        taken = numbers[:, ::step].flatten(1).T
        return torch.cat([taken, taken.new_zeros(-(-units * UNIT // inputs) - len(taken), len(codes))])

    step = group // size
    return PackedMatrix(
        form,
        weight.shape,
        group,
        dtype,
        codes=_plane(codes, form.bits),
        upper=_plane(codes >> form.bits, form.upper_bits) if form.upper_bits else None,
        scales=by_output(blocks.scales, group, step),
        small_scales=None if blocks.small_scales is None else by_output(blocks.small_scales, form.small),
        minimums=None if blocks.minimums is None else by_output(blocks.minimums, group, step),
        small_minimums=None if blocks.small_minimums is None else by_output(blocks.small_minimums, form.small),
        zeros=None if blocks.zeros is None else by_output(blocks.zeros, group, step),
    )


def _plane(codes: Tensor, bits: int) -> Tensor:
    """The lower bits of codes, uint8 [N, in] → words [U, N, BLOCK]. The last unit is filled up with zeros."""
    padded = F.pad(codes & (2**bits - 1), (0, -codes.shape[1] % UNIT))
    in_word = padded.view(len(codes), -1, CODES_PER_WORD, BLOCK).permute(1, 0, 3, 2)
    in_byte = in_word.unflatten(-1, (bits, CODES_PER_WORD // bits))
    word = torch.zeros(in_byte.shape[:-1], dtype=torch.uint8, device=codes.device)
    for n in range(CODES_PER_WORD // bits):
        word |= in_byte[..., n] << bits * n
    return word.view(WORDS[bits]).squeeze(-1)


def packed_row_bytes(kind: int, width: int) -> int:
    """Bytes of a row of GGUF's block type `kind`, on a device."""
    block = BLOCK_TYPES[kind]
    row = QuantizedWeight(kind, (1, width), np.zeros((1, width // block.size * block.bytes), dtype=np.uint8))
    return PackedMatrix.of(row, torch.device("cpu"), torch.float32).nbytes
