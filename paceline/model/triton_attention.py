"""Attention to keys and values behind tables of slots, by a Triton kernel: for NVIDIA GPUs without flash-attn 3.

Triton (Tillet et al. 2019) comes with torch's builds for CUDA. The softmax is computed block by block (FlashAttention,
Dao et al. 2022). A path is not split among programs, and a block has as many query rows whatever the pass has, so no
row's result depends on other rows.

Shape suffixes: R rows, S sequences, N columns of a table, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.gpu.launch import launch

SMALLEST_DOT = 16
"""Rows and columns of the smallest product that Triton has."""
BLOCK_QUERIES = 32
"""Query heads of a program, of eight rows with four heads each, say. Products of 64 are other instructions."""
BLOCK_BYTES = 16384
"""Of keys, or of values, that a program reads at a time, if that makes 16 to 64 positions."""


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """As flash-attn 3's function of this name, without a causal mask and with pages of one position.

    q [S, 1, H, D]: one row for each sequence. With cu_seqlens_q, int32 [S + 1], q [R, H, D]: the first row of each
    sequence, and at most max_seqlen_q rows in one. k_cache and v_cache [slots, 1, K, D]. page_table int32 [S, N].
    cache_seqlens int32 [S]. Returns the attention, as q, and log-sum-exps, float32 [S, H, 1] or [H, R]. A row that sees
    nothing has zeros and -inf.
    """
    varlen = cu_seqlens_q is not None
    rows = q if varlen else q.squeeze(1)
    sequences, size = len(page_table), q.shape[-1]
    kv_heads = k_cache.shape[2]
    queries_per_kv = rows.shape[1] // kv_heads
    out = torch.empty(rows.shape, dtype=q.dtype, device=q.device)
    weight = torch.empty(rows.shape[:2], dtype=torch.float32, device=q.device)
    padded = max(SMALLEST_DOT, triton.next_power_of_2(size))
    block = max(BLOCK_QUERIES, triton.next_power_of_2(queries_per_kv))
    positions = min(64, max(SMALLEST_DOT, BLOCK_BYTES // (padded * q.dtype.itemsize)))
    grid = (triton.cdiv(max_seqlen_q * queries_per_kv, block), kv_heads, sequences)
    launch(
        _attend,
        grid,
        rows,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        out,
        weight,
        softmax_scale,
        softcap,
        *rows.stride()[:2],
        k_cache.stride(0),
        k_cache.stride(2),
        page_table.stride(0),
        QUERIES_PER_KV=queries_per_kv,
        SIZE=size,
        PADDED_SIZE=padded,
        BLOCK=block,
        POSITIONS=positions,
        CAPPED=softcap != 0.0,
        VARLEN=varlen,
    )
    return (out, weight.T) if varlen else (out.unsqueeze(1), weight.unsqueeze(-1))


@triton.jit
def _attend(
    rows,
    keys,
    values,
    tables,
    lengths,
    starts,
    out,
    weights,
    scale,
    softcap,
    row_stride,
    head_stride,
    slot_stride,
    kv_stride,
    table_stride,
    QUERIES_PER_KV: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    CAPPED: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """One program: some rows of a sequence, with the query heads of one key-value head."""
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start, count = sequence, 1
    if VARLEN:
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
    query_of = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < count * QUERIES_PER_KV:
        row = (start + query_of // QUERIES_PER_KV).to(tl.int64)
        head = kv_head * QUERIES_PER_KV + query_of % QUERIES_PER_KV
        is_query = query_of < count * QUERIES_PER_KV
        number = tl.arange(0, PADDED_SIZE)
        is_number = number < SIZE
        here = is_query[:, None] & is_number[None, :]
        query = tl.load(rows + row[:, None] * row_stride + head[:, None] * head_stride + number[None, :], here, 0.0)
        largest = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        result = tl.zeros([BLOCK, PADDED_SIZE], tl.float32)
        length = tl.load(lengths + sequence)
        for first in range(0, length, POSITIONS):
            position = first + tl.arange(0, POSITIONS)
            seen = position < length
            slot = tl.load(tables + sequence * table_stride + position, seen, 0).to(tl.int64)
            at = slot[:, None] * slot_stride + kv_head * kv_stride + number[None, :]
            there = seen[:, None] & is_number[None, :]
            key = tl.load(keys + at, there, 0.0)
            value = tl.load(values + at, there, 0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
            score = tl.where(seen[None, :], score, -float("inf"))
            larger = tl.maximum(largest, tl.max(score, 1))
            kept = tl.exp(largest - larger)
            share = tl.exp(score - larger[:, None])
            total = total * kept + tl.sum(share, 1)
            result = result * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            largest = larger
        total = tl.where(total == 0.0, 1.0, total)
        result = result / total[:, None]
        heads = tl.num_programs(1) * QUERIES_PER_KV
        where = row * heads + head
        tl.store(out + where[:, None] * SIZE + number[None, :], result.to(out.dtype.element_ty), here)
        tl.store(weights + where, largest + tl.log(total), is_query)
