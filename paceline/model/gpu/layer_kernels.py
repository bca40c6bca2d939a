"""What a Llama layer does between its products, by Triton kernels: one program for a row, or for a head of a row.

A program's block follows from the width alone, so a row has the same bits beside any other rows.

Shape suffixes: R rows, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.gpu.launch import assert_contiguous, launch

WRITES_AT_ONCE = 256


def write_tables(tables: Tensor, writes: Tensor) -> None:
    """Set tables[table, position] = slot for each (table, position, slot) of `writes`, int32 [W, 3]."""
    grid = (triton.cdiv(len(writes), WRITES_AT_ONCE),)
    launch(_write_tables, grid, tables, writes, len(writes), tables.stride(0), BLOCK=WRITES_AT_ONCE)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of both, in x's dtype, and its RMSNorm (Zhang and Sennrich 2019) by a weight [width]: x [R, width].

    Without `added` the sum is x, without a weight the norm is the sum."""
    assert_contiguous(x, added)
    rows, width = x.shape
    total = x if added is None else torch.empty_like(x)
    if weight is None and added is None:
        return x, x
    normed = total if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    launch(_add_norm, (rows,), x, added, weight, total, normed, eps, WIDTH=width, BLOCK=block, ADDS=added is not None,
                       NORMS=weight is not None, num_warps=max(1, min(16, block // 256)))  # fmt: skip
    return total, normed


def join(
    tokens: Tensor,
    embedding: Tensor,
    states: Tensor,
    token_norm: Tensor | None,
    state_norm: Tensor | None,
    eps: float,
    *,
    norms_residual: bool,
) -> tuple[Tensor, Tensor]:
    """The embedding of each token and a state beside it, each with its RMSNorm: tokens [R], embedding [V, width],
    states [R, width] → [R, 2 * width]. A norm without a weight changes nothing. Before it in the tuple are the states,
    normed if `norms_residual`."""
    assert_contiguous(tokens, embedding, states)
    rows, width = states.shape
    residual = torch.empty_like(states) if norms_residual else states
    out = torch.empty(rows, 2 * width, dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(width)
    launch(_join, (rows, 2), tokens, embedding, states, token_norm, state_norm, residual, out, eps, WIDTH=width,
           BLOCK=block, NORMS_RESIDUAL=norms_residual, TOKEN_NORM=token_norm is not None,
           STATE_NORM=state_norm is not None, num_warps=max(1, min(16, block // 256)))  # fmt: skip
    return residual, out


def rotate_and_store(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    data: Tensor,
    norms: Tensor | None,
    eps: float,
) -> Tensor:
    """Rotary embedding of queries and keys, half-split (Su et al. 2021); keys and values are stored.

    projected [R, H + 2 * K, D]. positions, slots: integers [R]. cosines, sines [positions, D]: the sines of the first
    half have the other sign. data [slots, 2 * K, D]: a layer's keys, then values. norms [H + K, D]: weights of
    an RMSNorm of each head before; None: none. Returns the queries, [R, H, D].
    """
    assert_contiguous(projected, positions, slots, cosines, sines)
    rows, count, size = projected.shape
    kv_heads = data.shape[1] // 2
    query = torch.empty(rows, count - 2 * kv_heads, size, dtype=projected.dtype, device=projected.device)
    launch(
        _rotate_and_store, (rows, count),
        projected, positions, slots, cosines, sines, data, norms, query, eps, *data.stride()[:2],
        KV_HEADS=kv_heads, SIZE=size, HALF=size // 2, BLOCK=triton.next_power_of_2(size), NORMS=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return query


def silu_times(x: Tensor) -> Tensor:
    """silu(first half) * second half: x [R, 2 * width] → [R, width]."""
    assert_contiguous(x)
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = 1024
    launch(_silu_times, (rows, triton.cdiv(width, block)), x, out, WIDTH=width, BLOCK=block)
    return out


@triton.jit(do_not_specialize=["count", "stride"])
def _write_tables(tables, writes, count, stride, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    table = tl.load(writes + 3 * n, n < count, 0)
    position = tl.load(writes + 3 * n + 1, n < count, 0)
    slot = tl.load(writes + 3 * n + 2, n < count, 0)
    tl.store(tables + table.to(tl.int64) * stride + position, slot, n < count)


@triton.jit
def _add_norm(
    x, added, weight, total, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    here, at = n < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + n
    summed = tl.load(x + at, here, 0.0)
    if ADDS:
        summed = (summed.to(tl.float32) + tl.load(added + at, here, 0.0).to(tl.float32)).to(summed.dtype)
        tl.store(total + at, summed, here)
    if NORMS:
        tl.store(normed + at, _normed(summed, tl.load(weight + n, here, 0.0), eps, WIDTH), here)


@triton.jit
def _join(
    tokens, embedding, states, token_norm, state_norm, residual, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NORMS_RESIDUAL: tl.constexpr, TOKEN_NORM: tl.constexpr, STATE_NORM: tl.constexpr,
):  # fmt: skip
    row, part, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    here, at = n < WIDTH, (2 * row + part) * WIDTH + n
    if part == 0:
        raw = tl.load(embedding + tl.load(tokens + row).to(tl.int64) * WIDTH + n, here, 0.0)
        if TOKEN_NORM:
            raw = _normed(raw, tl.load(token_norm + n, here, 0.0), eps, WIDTH)
        tl.store(out + at, raw, here)
    else:
        raw = tl.load(states + row * WIDTH + n, here, 0.0)
        if STATE_NORM:
            raw = _normed(raw, tl.load(state_norm + n, here, 0.0), eps, WIDTH)
        tl.store(out + at, raw, here)
        if NORMS_RESIDUAL:
            tl.store(residual + row * WIDTH + n, raw, here)


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    return (wide * scale * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate_and_store(
    projected, positions, slots, cosines, sines, data, norms, query, eps, slot_stride, kv_stride,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(1)
    rotated = count - KV_HEADS
    queries = rotated - KV_HEADS
    n = tl.arange(0, BLOCK)
    here, swapped = n < SIZE, tl.where(n < HALF, n + HALF, n - HALF)
    at = (row * count + head).to(tl.int64) * SIZE
    raw = tl.load(projected + at + n, here, 0.0)
    out = raw
    if head < rotated:
        x, other = raw.to(tl.float32), tl.load(projected + at + swapped, here, 0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            x = x * scale * tl.load(norms + head * SIZE + n, here, 0.0).to(tl.float32)
            other = other * scale * tl.load(norms + head * SIZE + swapped, here, 0.0).to(tl.float32)
        angle = tl.load(positions + row).to(tl.int64) * SIZE + n
        cosine, sine = tl.load(cosines + angle, here, 0.0), tl.load(sines + angle, here, 0.0)
        out = (x * cosine.to(tl.float32) + other * sine.to(tl.float32)).to(raw.dtype)
    if head < queries:
        tl.store(query + (row * queries + head).to(tl.int64) * SIZE + n, out, here)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(data + slot * slot_stride + (head - queries) * kv_stride + n, out, here)


@triton.jit
def _silu_times(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = n < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + n, here, 0.0)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + n, here, 0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * WIDTH + n, (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(gate.dtype), here)
