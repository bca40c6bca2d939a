"""Products with quantised matrices, by Triton kernels: codes become numbers in registers, whatever the format.

Numbers are rounded once, to the dtype of rows, as they would be if a checkpoint were multiplied out. Rows are not
quantised. Sums are float32.

A row's bits do not depend on other rows. A tile has 64 rows, however many there are, and one kernel computes all
tiles. Inputs are split among programs by the size of the matrix alone, and the parts are added in ascending order.

Shape suffixes: R rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from subprocess import SubprocessError
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from paceline.model.gpu.launch import launch
from paceline.model.gpu.packed_formats import Planes
from paceline.model.native.build import NativeUnavailableError

ROWS = 64
"""Of a tile: a column of the product of a program, which has OUTPUTS rows."""
OUTPUTS = 64
PROGRAMS = 264
"""Wanted for each tile of rows: two for each multiprocessor of an H100, whatever the GPU, for equal bits."""
ADDED = 1024
"""Numbers of a program that adds parts."""
WARPS, STAGES = 4, 2
"""With integers of 4 bits a program has 74 KB of shared memory; three stages take 116, and leave room for one."""
IQ4_LOW = tl.constexpr(0x_F6EA_DDCF_BFAD_9881 - 2**64)
IQ4_HIGH = tl.constexpr(0x_7159_4535_2619_0D01)
"""Values of llama.cpp's sixteen non-linear codes (ggml/src/ggml-common.h), a byte each."""


class PackedProduct:
    """`x @ weight.T + bias`. A row's bits do not depend on the number of rows."""

    def __init__(self, weights: Sequence[Tensor | Planes], bias: Tensor | None) -> None:
        """Weights [out, in] are stacked; at least one is packed. `bias` [out].

        Raises `NativeUnavailableError` if Triton compiles nothing for this device.
        """
        self._weights, self._bias = weights, bias
        self._ends = list(accumulate(map(len, weights), initial=0))
        packed = next(each for each in weights if isinstance(each, Planes))
        try:
            self(torch.zeros(1, packed.shape[1], dtype=packed.dtype, device=packed.device))
        except RuntimeError as error:  # this GPU lacks what it takes, or the C compiler failed
            if not isinstance(error.__cause__, TritonError | SubprocessError):
                raise
            raise NativeUnavailableError(str(error)) from error

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, in] → [R, out], in x's dtype."""
        y = torch.empty(len(x), self._ends[-1], dtype=x.dtype, device=x.device)
        for weight, (start, end) in zip(self._weights, pairwise(self._ends), strict=True):
            bias = None if self._bias is None else self._bias[start:end]
            if isinstance(weight, Planes):
                _multiply(x.contiguous(), weight, bias, y[:, start:end])
            else:
                y[:, start:end] = F.linear(x, weight, bias)
        return y


def input_splits(outputs: int, units: int) -> int:
    """Parts of the inputs that programs sum on their own. A function of the matrix' size alone."""
    wanted = min(units, -(-PROGRAMS // -(-outputs // OUTPUTS)))
    return -(-units // -(-units // wanted))


def look_up(matrix: Planes, rows: Tensor) -> Tensor:
    """See `PackedMatrix.lookup`."""
    found = torch.empty(len(rows), matrix.shape[1], dtype=matrix.dtype, device=rows.device)
    if len(rows):
        launch(_look_up, (len(rows), len(matrix.codes)), rows.contiguous(), found, *matrix.shape, **_planes(matrix))
    return found


def _multiply(x: Tensor, matrix: Planes, bias: Tensor | None, y: Tensor) -> None:
    """y [R, out], whose rows may be apart."""
    (out, width), units, rows = matrix.shape, len(matrix.codes), len(x)
    splits = input_splits(out, units)
    if rows == 0:
        return
    alone = splits == 1
    parts = y if alone else torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    launch(
        _product,
        (triton.cdiv(out, OUTPUTS), splits, triton.cdiv(rows, ROWS)),
        x,
        parts,
        bias if alone else None,
        rows,
        out,
        width,
        units,
        -(-units // splits),
        parts.stride(-2),
        **_planes(matrix),
        OUTPUTS=OUTPUTS,
        ROWS=ROWS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if not alone:
        grid = triton.cdiv(out, ADDED), rows
        launch(_add_parts, grid, parts, y, bias, rows, out, y.stride(0), splits, ADDED=ADDED)


def _planes(matrix: Planes) -> dict[str, Any]:
    """What `_numbers` takes of a matrix."""
    form = matrix.format
    return {
        "pitch": matrix.scales.stride(0),
        "codes": matrix.codes,
        "upper": matrix.upper,
        "scales": matrix.scales,
        "small_scales": matrix.small_scales,
        "minimums": matrix.minimums,
        "small_minimums": matrix.small_minimums,
        "zeros": matrix.zeros,
        "group": matrix.group,
        "BITS": form.bits,
        "UPPER_BITS": form.upper_bits,
        "VALUES": form.values,
        "ZERO": form.zero,
        "SMALL": form.small,
    }


@triton.jit
def _by_output(plane, index, pitch, output, is_output):
    """Numbers of a group or block, float32 [N, 1]."""
    return tl.load(plane + index * pitch + output, is_output, 0).to(tl.float32)[:, None]


@triton.jit
def _small(plane, block, pitch, output, is_output, SMALL: tl.constexpr):
    """Small integers of a block, float32 [N, 1], or of its halves, [N, BLOCK]."""
    if SMALL == 32:
        return _by_output(plane, block, pitch, output, is_output)
    else:
        half = 2 * block + tl.arange(0, 32) // 16
        return tl.load(plane + half[None, :] * pitch + output[:, None], is_output[:, None], 0).to(tl.float32)


@triton.jit
def _numbers(
    words,
    upper_words,
    block,
    pitch,
    output,
    is_output,
    scales,
    small_scales,
    minimums,
    small_minimums,
    zeros,
    group,
    NUMBER: tl.constexpr,
    BITS: tl.constexpr,
    UPPER_BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Numbers of a block, float32 [N, BLOCK], from code NUMBER of each word of its unit."""
    code = (words >> (BITS * NUMBER)).to(tl.int32) & ((1 << BITS) - 1)
    if UPPER_BITS:
        high = (upper_words >> (UPPER_BITS * NUMBER)).to(tl.int32) & ((1 << UPPER_BITS) - 1)
        code = code | (high << BITS)
    index = block * 32 // group
    if VALUES == "e4m3":  # as the upper bits of a float whose exponent is 120 too small
        value = ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif VALUES == "e2m1":  # the same, 126 too small
        value = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif VALUES == "iq4":
        value = (tl.where(code < 8, IQ4_LOW, IQ4_HIGH) >> (8 * (code & 7))).to(tl.int8).to(tl.float32)
    elif zeros is not None:
        value = code.to(tl.float32) - _by_output(zeros, index, pitch, output, is_output)
    else:
        value = (code - ZERO).to(tl.float32)
    if scales.dtype.element_ty == tl.uint8:  # exponents of e8m0; 2^-127 is a denormal
        exponent = tl.load(scales + index * pitch + output, is_output, 0).to(tl.int32)
        scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        scale = _by_output(scales, index, pitch, output, is_output)
    if SMALL:
        scale = scale * _small(small_scales, block, pitch, output, is_output, SMALL)
    number = value * scale
    if minimums is not None:
        minimum = _by_output(minimums, index, pitch, output, is_output)
        if SMALL:
            minimum = minimum * _small(small_minimums, block, pitch, output, is_output, SMALL)
        number = number - minimum
    return number


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    parts,
    bias,
    rows,
    outputs,
    inputs,
    units,
    units_of_split,
    row_stride,
    pitch,
    codes,
    upper,
    scales,
    small_scales,
    minimums,
    small_minimums,
    zeros,
    group,
    BITS: tl.constexpr,
    UPPER_BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    SMALL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: some outputs, a part of the inputs, and a tile of rows."""
    split = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, 32)
    is_output, is_row = output < outputs, row < rows
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for unit in range(split * units_of_split, min(units, (split + 1) * units_of_split)):
        word = (unit * pitch + output[:, None]) * 32 + within[None, :]
        words = tl.load(codes + word, is_output[:, None], 0)
        upper_words = words
        if UPPER_BITS:
            upper_words = tl.load(upper + word, is_output[:, None], 0)
        for n in tl.static_range(8):
            block = unit * 8 + n
            weight = _numbers(
                words,
                upper_words,
                block,
                pitch,
                output,
                is_output,
                scales,
                small_scales,
                minimums,
                small_minimums,
                zeros,
                group,
                n,
                BITS,
                UPPER_BITS,
                VALUES,
                ZERO,
                SMALL,
            )
            number = block * 32 + within
            there = is_row[None, :] & (number < inputs)[:, None]
            taken = tl.load(x + row[None, :] * inputs + number[:, None], there, 0.0)
            sums = tl.dot(weight.to(x.dtype.element_ty), taken, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, is_output, 0.0).to(tl.float32)[:, None]
    to = (split * rows + row.to(tl.int64))[None, :] * row_stride + output[:, None]
    tl.store(parts + to, sums.to(parts.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_parts(parts, y, bias, rows, outputs, row_stride, splits, ADDED: tl.constexpr):
    """One program: some outputs of a row, from float32 parts [splits, R, N]."""
    row, output = tl.program_id(1), tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    is_output = output < outputs
    total = tl.load(parts + row.to(tl.int64) * outputs + output, is_output, 0.0)
    for split in range(1, splits):
        total += tl.load(parts + (split * rows + row.to(tl.int64)) * outputs + output, is_output, 0.0)
    if bias is not None:
        total += tl.load(bias + output, is_output, 0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * row_stride + output, total.to(y.dtype.element_ty), is_output)


@triton.jit
def _look_up(
    wanted,
    found,
    outputs,
    inputs,
    pitch,
    codes,
    upper,
    scales,
    small_scales,
    minimums,
    small_minimums,
    zeros,
    group,
    BITS: tl.constexpr,
    UPPER_BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    SMALL: tl.constexpr,
):
    """One program: a unit of one wanted output."""
    unit, within = tl.program_id(1), tl.arange(0, 32)
    output = tl.load(wanted + tl.program_id(0) + tl.arange(0, 1))
    is_output = output < outputs
    at = (unit * pitch + output[:, None]) * 32 + within[None, :]
    words = tl.load(codes + at)
    upper_words = words
    if UPPER_BITS:
        upper_words = tl.load(upper + at)
    for n in tl.static_range(8):
        number = (unit * 8 + n) * 32 + within
        weight = _numbers(
            words,
            upper_words,
            unit * 8 + n,
            pitch,
            output,
            is_output,
            scales,
            small_scales,
            minimums,
            small_minimums,
            zeros,
            group,
            n,
            BITS,
            UPPER_BITS,
            VALUES,
            ZERO,
            SMALL,
        )
        to = tl.program_id(0).to(tl.int64) * inputs + number[None, :]
        tl.store(found + to, weight.to(found.dtype.element_ty), number[None, :] < inputs)
