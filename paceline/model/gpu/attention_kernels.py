"""Attention over rows by Triton kernels, which read keys and values where they are, through tables of slots.

Triton (Tillet et al. 2019) comes with torch's builds for CUDA. The softmax is computed block by block (FlashAttention,
Dao et al. 2022), and paths are split among programs (Flash-Decoding, Dao et al. 2023).

A row attends in parts: its path's full tiles of TILE positions, in splits of SPLIT positions counted from position 0,
and last the tile of its own position. The parts are added up in this order. So the order of a row's sums follows from
its position alone: not from the other rows of the pass, how many programs share the work, or whether a position was
committed or guessed. Products have the same shape in every pass, and nothing is contracted into fused operations, which
a compiler might do in one kernel and not in another.

Shape suffixes: R rows, G groups of rows, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.gpu.launch import launch
from paceline.model.gpu.memory import MOST_ITEMS
from paceline.model.gpu.paths import RowPaths
from paceline.model.rows import GROUP, TILE

SPLIT = 1024
"""Positions of a part of the full tiles. Up to MOST_ITEMS parts of all groups are computed apart; where there are more,
each group is one item."""
PREFIX_PROGRAMS = 64
"""Programs for each key-value head that share the items."""
SMALLEST_DOT = 16
"""Rows and columns of the smallest product that Triton has."""
MOST_HEADS = 8
"""Query heads of a program, each with GROUP rows."""
MOST_NUMBERS = 4096
"""Of the result of a program. With twice as many, registers are spilled by 4, 8 and 16 warps (an H100's)."""
EXACT = {"enable_fp_fusion": False}


def plan(paths: RowPaths) -> Tensor:
    """How the splits of full tiles are shared out: int32 [G + 2].

    Item i is of group g if plan[g] <= i < plan[g + 1]. The last number is 1 if an item is a split of its group, and 0
    if it has all splits.
    """
    groups = len(paths.groups) - 1
    out = torch.empty(groups + 2, dtype=torch.int32, device=paths.groups.device)
    launch(_plan, (1,), paths.groups, paths.seen, out, groups, MOST_ITEMS, **_order(groups))
    return out


def attend(
    query: Tensor,
    data: Tensor,
    paths: RowPaths,
    plan: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row to its path: query [R, H, D] → [R, H * D].

    data [slots, 2 * K, D]: a layer's keys, then values. `window`: positions that a row sees, its own included; 0: all.
    `sinks` [H]: scores without values. A row that sees nothing gets zeros.
    """
    rows, heads, size = query.shape
    kv_heads, groups = data.shape[1] // 2, len(paths.groups) - 1
    queries_per_kv = heads // kv_heads
    padded = max(SMALLEST_DOT, triton.next_power_of_2(size))
    chunk = min(MOST_HEADS, MOST_NUMBERS // (GROUP * padded), triton.next_power_of_2(queries_per_kv))
    chunks = triton.cdiv(queries_per_kv, chunk)
    items = max(MOST_ITEMS, groups)
    results = torch.empty(items * GROUP + rows, heads, size, dtype=torch.float32, device=query.device)
    stats = torch.empty(items * GROUP + rows, heads, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads * size, dtype=query.dtype, device=query.device)
    shape = {"QUERIES_PER_KV": queries_per_kv, "SIZE": size, "PADDED_SIZE": padded, "HEADS": chunk}
    order = _order(groups)
    launch(
        _attend, (rows + PREFIX_PROGRAMS, kv_heads, chunks),
        query, data, *paths, plan, results, stats, scale, softcap, window, rows, groups, items * GROUP,
        *query.stride()[:2], *data.stride()[:2], paths.tables.stride(0),
        CAPPED=softcap != 0.0, **shape, **order, **EXACT, num_warps=4 if padded <= 64 else 8,
    )  # fmt: skip
    launch(
        _merge, (rows, kv_heads, chunks),
        results, stats, paths.seen, paths.groups, plan, sinks, out, window, groups, items * GROUP,
        SINKS=sinks is not None, **shape, **order, **EXACT,
    )  # fmt: skip
    return out


def _order(groups: int) -> dict[str, int]:
    """What decides how sums are ordered, for `plan` and `attend` alike."""
    return {"GROUPS": triton.next_power_of_2(groups), "GROUP": GROUP, "TILE": TILE, "SPLIT": SPLIT}


@triton.jit(do_not_specialize=["group_count"])
def _plan(
    groups, seen, out, group_count, most, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUPS)
    there = group < group_count
    first = tl.load(groups + group, there, 0)
    last = tl.load(groups + group + 1, there, 0)
    splits = tl.zeros([GROUPS], tl.int32)
    for n in tl.static_range(GROUP):
        visible = tl.load(seen + first + n, there & (first + n < last), 0)
        full = tl.maximum(visible - 1, 0) // TILE * TILE
        splits = tl.maximum(splits, (full + SPLIT - 1) // SPLIT)
    apart = tl.sum(splits, 0) <= most
    items = tl.where(apart, splits, tl.minimum(splits, 1))
    tl.store(out, 0)
    tl.store(out + 1 + group, tl.cumsum(items, 0), there)
    tl.store(out + 1 + group_count, apart.to(tl.int32))


@triton.jit
def _group_of(bounds, n, group_count, GROUPS: tl.constexpr):
    """The group g with bounds[g] <= n < bounds[g + 1]."""
    group = tl.arange(0, GROUPS)
    bound = tl.load(bounds + 1 + group, group < group_count, 2147483647)
    return tl.sum((bound <= n).to(tl.int32), 0)


@triton.jit
def _attend_block(
    largest, total, result, query, slot, is_read, is_seen, keys, values, slot_stride, scale, softcap,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile more. A row that sees nothing of it keeps its numbers, bit for bit."""
    number = tl.arange(0, PADDED_SIZE)
    at = slot.to(tl.int64)[:, None] * slot_stride + number[None, :]
    there = is_read[:, None] & (number < SIZE)[None, :]
    key = tl.load(keys + at, there, 0.0)
    value = tl.load(values + at, there, 0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
    score = tl.where(is_seen, score, -float("inf"))
    larger = tl.maximum(largest, tl.max(score, 1))
    finite = tl.where(larger == -float("inf"), 0.0, larger)
    kept = tl.exp(largest - finite)
    share = tl.exp(score - finite[:, None])
    total = total * kept + tl.sum(share, 1)
    result = result * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return larger, total, result


@triton.jit
def _add(largest, total, result, more_largest, more_total, more_result):
    """Two parts of a path as one."""
    larger = tl.maximum(largest, more_largest)
    finite = tl.where(larger == -float("inf"), 0.0, larger)
    kept, share = tl.exp(largest - finite), tl.exp(more_largest - finite)
    return larger, total * kept + more_total * share, result * kept[:, None] + more_result * share[:, None]


@triton.jit(do_not_specialize=["window", "row_count", "group_count", "first_tail", "table_stride"])
def _attend(
    rows_query, data, tables, table, committed, seen, branch, branches, groups, plan, results, stats,
    scale, softcap, window, row_count, group_count, first_tail,
    row_stride, head_stride, slot_stride, kv_stride, table_stride,
    CAPPED: tl.constexpr, QUERIES_PER_KV: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: the last tile of a row, or of a group without branches; or some items of full tiles."""
    program, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    BLOCK: tl.constexpr = GROUP * HEADS if GROUP * HEADS > 16 else 16
    query_row = tl.arange(0, BLOCK)
    number = tl.arange(0, PADDED_SIZE)
    column = tl.arange(0, TILE)
    of_row, of_head = query_row // HEADS, chunk * HEADS + query_row % HEADS
    head = kv_head * QUERIES_PER_KV + of_head
    is_tail = program < row_count
    bounds = groups if is_tail else plan
    item = program if is_tail else program - row_count
    step = row_count if is_tail else tl.num_programs(0) - row_count
    stop = program + 1 if is_tail else tl.load(plan + group_count)
    apart = tl.load(plan + group_count + 1)
    keys, values = data + kv_head * kv_stride, data + (kv_heads + kv_head) * kv_stride
    while item < stop:
        group = _group_of(bounds, item, group_count, GROUPS)
        first = tl.load(groups + group, group < group_count, 0)
        last = tl.load(groups + group + 1, group < group_count, 0)
        row = first + of_row
        is_query = (of_row < GROUP) & (row < last) & (of_head < QUERIES_PER_KV)
        here = is_query[:, None] & (number < SIZE)[None, :]
        query = tl.load(
            rows_query + row.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + number[None, :],
            here,
            0.0,
        )
        visible = tl.load(seen + row, is_query, 0)
        oldest = tl.where(window > 0, tl.maximum(visible - window, 0), 0)
        full = tl.maximum(visible - 1, 0) // TILE * TILE
        of_table = tl.load(committed + row, is_query, 0)
        has_branch = is_query & (of_table < visible)
        slots = tables + tl.load(table + first, first < last, 0).to(tl.int64) * table_stride
        if is_tail:
            branching = tl.max(has_branch.to(tl.int32), 0) > 0  # then each row's program computes its own tile
            is_query = is_query & ((row == item) | (branching == 0))
            begin = tl.min(tl.where(is_query, full, 2147483647), 0)
            end = tl.max(tl.where(is_query, visible, 0), 0)
            end = tl.where((item < last) & (branching | (item == first)), end, begin)
            shared_end = tl.where(branching, begin, end)
            at = first_tail + row
        else:
            split = item - tl.load(plan + group)
            begin = tl.where(apart > 0, split * SPLIT, 0)
            end = tl.max(full, 0)
            end = tl.where(apart > 0, tl.minimum(end, begin + SPLIT), end)
            shared = tl.where(has_branch & (of_table < full), of_table // TILE * TILE, 2147483647)
            shared_end = tl.min(shared, 0)
            at = item * GROUP + of_row
        largest = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        result = tl.zeros([BLOCK, PADDED_SIZE], tl.float32)
        part = begin
        while part < end:
            part_largest = tl.full([BLOCK], -float("inf"), tl.float32)
            part_total = tl.zeros([BLOCK], tl.float32)
            part_result = tl.zeros([BLOCK, PADDED_SIZE], tl.float32)
            part_end = end if is_tail else tl.minimum(end, part // SPLIT * SPLIT + SPLIT)
            newest_hidden = tl.min(tl.where(is_query, oldest, 2147483647), 0)
            for tile in range(tl.maximum(part, newest_hidden // TILE * TILE), part_end, TILE):
                position = tile + column
                limit = visible if is_tail else full
                sees = is_query[:, None] & (position[None, :] < limit[:, None]) & (position[None, :] >= oldest[:, None])
                if is_tail:
                    sees = sees & (full == tile)[:, None]
                if tile < shared_end:
                    is_read = position < end
                    slot = tl.load(slots + position, is_read, 0)
                    part_largest, part_total, part_result = _attend_block(
                        part_largest, part_total, part_result, query, slot, is_read, sees, keys, values, slot_stride,
                        scale, softcap, SIZE, PADDED_SIZE, CAPPED,
                    )  # fmt: skip
                else:
                    only = item if is_tail else first
                    until = item + 1 if is_tail else last
                    for other in range(only, until):
                        known = tl.load(committed + other)
                        is_read = position < tl.load(seen + other)
                        in_table = position < known
                        slot = tl.load(slots + position, is_read & in_table, 0)
                        guess = branches + tl.load(branch + other) + position - known
                        slot = tl.where(in_table, slot, tl.load(guess, is_read & ~in_table, 0))
                        part_largest, part_total, part_result = _attend_block(
                            part_largest, part_total, part_result, query, slot, is_read, sees & (row == other)[:, None],
                            keys, values, slot_stride, scale, softcap, SIZE, PADDED_SIZE, CAPPED,
                        )  # fmt: skip
            largest, total, result = _add(largest, total, result, part_largest, part_total, part_result)
            part = part_end
        where = at.to(tl.int64) * (kv_heads * QUERIES_PER_KV) + head
        written = is_query & (begin < end)
        tl.store(results + where[:, None] * SIZE + number[None, :], result, written[:, None] & (number < SIZE)[None, :])
        tl.store(stats + where * 2, largest, written)
        tl.store(stats + where * 2 + 1, total, written)
        item += step


@triton.jit(do_not_specialize=["window", "group_count", "first_tail"])
def _merge(
    results, stats, seen, groups, plan, sinks, out, window, group_count, first_tail,
    SINKS: tl.constexpr, QUERIES_PER_KV: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: the parts of some heads of a row, added up."""
    row, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * QUERIES_PER_KV
    of_head = chunk * HEADS + tl.arange(0, HEADS)
    head = kv_head * QUERIES_PER_KV + of_head
    number = tl.arange(0, PADDED_SIZE)
    is_head = of_head < QUERIES_PER_KV
    here = is_head[:, None] & (number < SIZE)[None, :]
    visible = tl.load(seen + row)
    oldest = tl.where(window > 0, tl.maximum(visible - window, 0), 0)
    full = tl.maximum(visible - 1, 0) // TILE * TILE
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, PADDED_SIZE], tl.float32)
    if visible > 0:
        group = _group_of(groups, row, group_count, GROUPS)
        item = tl.load(plan + group)
        first_split, splits = oldest // SPLIT, (full + SPLIT - 1) // SPLIT
        if tl.load(plan + group_count + 1) == 0:  # all in one item
            first_split, splits = 0, tl.minimum(splits, 1)
        at = (item * GROUP + row - tl.load(groups + group)).to(tl.int64)
        for n in range(first_split, splits + 1):
            where = tl.where(n < splits, at + n * GROUP, (first_tail + row).to(tl.int64)) * heads + head
            largest, total, result = _add(
                largest, total, result,
                tl.load(stats + where * 2, is_head, -float("inf")),
                tl.load(stats + where * 2 + 1, is_head, 0.0),
                tl.load(results + where[:, None] * SIZE + number[None, :], here, 0.0),
            )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, is_head, -float("inf")).to(tl.float32)
        largest, total, result = _add(largest, total, result, sink, tl.where(is_head, 1.0, 0.0), result * 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    result = result / total[:, None]
    where = row.to(tl.int64) * heads + head
    tl.store(out + where[:, None] * SIZE + number[None, :], result.to(out.dtype.element_ty), here)
