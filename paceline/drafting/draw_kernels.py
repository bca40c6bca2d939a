"""What follows the network in a level of a draft, as three Triton kernels: the target's draws are predicted, and the
likeliest nodes chosen.

Draws are predicted as `predict_draws` does, for requests whose draws no mask, bias or penalty changes. Numbers are
sorted as 64-bit integers: a float32 in an integer's order, then its index, so that the lower one wins a tie.

Shapes: R rows, V columns of logits, K children of a row; N requests with W rows each; D levels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sampling import TOP_P_UNITS
from paceline.drafting.draw_prediction import SHORTLIST_SIZE
from paceline.model.gpu.launch import assert_contiguous, launch

COLUMNS = 1024
"""Of a row of logits that one program reads."""
FEATURES = 1024
"""Numbers of each feature that one program copies."""
CHUNK = 1024
"""Candidates of a row that are merged at a time."""
LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below every number that is sorted."""
UNITS = tl.constexpr(float(TOP_P_UNITS))


def predict(
    logits_RV: Tensor, keys_R2: Tensor, params_5R: Tensor, ids_V: Tensor | None, tokens_RK: Tensor, log_probs_RK: Tensor
) -> None:
    """Write the K likeliest results of each row's draw, int64, and their log-probabilities, float32.

    keys_R2: int64, the halves of `position_key`. params_5R: float64, see `draw_params`. `ids_V`: see `top_scores`. A
    token that a filter leaves out has -inf.
    """
    assert_contiguous(keys_R2, params_5R, ids_V, tokens_RK, log_probs_RK)
    rows, columns = logits_RV.shape
    blocks = triton.cdiv(columns, COLUMNS)
    best = torch.empty(rows, blocks, SHORTLIST_SIZE, dtype=torch.int64, device=logits_RV.device)
    launch(
        _likeliest,
        (rows, blocks),
        logits_RV,
        best,
        columns,
        logits_RV.stride(0),
        COLUMNS=COLUMNS,
        SHORTLIST=SHORTLIST_SIZE,
    )
    launch(
        _draw,
        (rows,),
        best,
        keys_R2,
        params_5R,
        tokens_RK if ids_V is None else ids_V,
        tokens_RK,
        log_probs_RK,
        rows,
        min(columns, SHORTLIST_SIZE),
        blocks * SHORTLIST_SIZE,
        CHUNK=CHUNK,
        SHORTLIST=SHORTLIST_SIZE,
        WIDTH=tokens_RK.shape[-1],
        PADDED_WIDTH=_padded(tokens_RK.shape[-1]),
        MAPPED=ids_V is not None,
    )


def choose(
    path_log_probs: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    branches: Tensor,
    slots: Tensor,
    level: int,
    features: Tensor | None,
    chosen: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The W likeliest children of each request's W nodes, at depth `level` + 1: their path log-probabilities [N, W],
    tokens [N * W], branches, and features, which are their parents'.

    path_log_probs float32 [N, W]. tokens int64, log_probs float32 [N, W, K]: the children. branches int32
    [N * W, D - 1]: the slots of each node's path. slots int64 [N * W]: of the nodes that are chosen. features
    [N * W, h]. Writes to `chosen` [N, W] which of the W * K children they are.
    """
    assert_contiguous(path_log_probs, tokens, log_probs, branches, slots, features, chosen)
    requests, width, children = log_probs.shape
    depth = branches.shape[-1]
    next_paths, next_branches = torch.empty_like(path_log_probs), torch.empty_like(branches)
    next_tokens = torch.empty(requests * width, dtype=torch.int64, device=tokens.device)
    next_features = None if features is None else torch.empty_like(features)
    size = 0 if features is None else features.shape[-1]
    launch(
        _choose,
        (requests, max(1, triton.cdiv(size, FEATURES))),
        path_log_probs,
        tokens,
        log_probs,
        branches,
        slots,
        path_log_probs if features is None else features,
        next_paths,
        next_tokens,
        next_branches,
        path_log_probs if next_features is None else next_features,
        chosen,
        level,
        depth,
        size,
        WIDTH=width,
        PADDED_WIDTH=_padded(width),
        CHILDREN=children,
        CANDIDATES=_padded(width * children),
        PADDED_DEPTH=triton.next_power_of_2(max(1, depth)),
        FEATURES=FEATURES,
    )
    return next_paths, next_tokens, next_branches, next_features


def _padded(count: int) -> int:
    """The next power of 2 that `tl.topk` sorts: it cannot select one number."""
    return max(2, int(triton.next_power_of_2(count)))


@triton.jit
def _sortable(number, index):
    """float32 and an index below 2^31 as int64. NaN is the least."""
    bits = tl.where(number == number, number, -float("inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _number(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _likeliest(logits, best, columns, row_stride, COLUMNS: tl.constexpr, SHORTLIST: tl.constexpr):
    """One program: the shortlist of some columns of a row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    logit = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
    keys = tl.topk(_sortable(logit, column), SHORTLIST)
    at = (row * tl.num_programs(1) + block) * SHORTLIST + tl.arange(0, SHORTLIST)
    tl.store(best + at, keys)


@triton.jit
def _draw(
    best,
    noise_keys,
    params,
    ids,
    tokens,
    log_probs,
    rows,
    shortlist,
    candidates,
    CHUNK: tl.constexpr,
    SHORTLIST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """One program: the draw of a row."""
    row = tl.program_id(0).to(tl.int64)
    keys = tl.full([SHORTLIST], LEAST, tl.int64)
    for first in range(0, candidates, CHUNK):
        candidate = first + tl.arange(0, CHUNK)
        more = tl.load(best + row * candidates + candidate, candidate < candidates, LEAST)
        both = tl.join(keys, tl.topk(more, SHORTLIST))
        keys = tl.topk(tl.reshape(both, [2 * SHORTLIST]), SHORTLIST)
    rank = tl.arange(0, SHORTLIST)
    token = _index(keys).to(tl.int64)
    here = rank < shortlist
    if MAPPED:
        token = tl.load(ids + token, here, 0)
    logit = tl.where(here, _number(keys), -float("inf"))
    temperature = tl.load(params + row).to(tl.float32)
    noise_factor = tl.load(params + rows + row).to(tl.float32)
    least = tl.load(params + 2 * rows + row).to(tl.float32)
    last = tl.minimum(tl.load(params + 3 * rows + row).to(tl.int32), shortlist - 1)
    mass = tl.load(params + 4 * rows + row).to(tl.int64)

    x = (logit - tl.max(logit)) / temperature
    x = tl.where(x < least, -float("inf"), x)
    x = tl.where(x < tl.sum(tl.where(rank == last, x, 0.0)), -float("inf"), x)
    share = tl.exp(x - tl.log(tl.sum(tl.exp(x))))
    summed = tl.cumsum((share * UNITS).to(tl.int64))
    kept = tl.minimum(tl.sum((summed < mass).to(tl.int32)), shortlist - 1)
    x = tl.where(x < tl.sum(tl.where(rank == kept, x, 0.0)), -float("inf"), x)

    bits = token ^ tl.load(noise_keys + 2 * row)
    bits ^= bits >> 16
    bits = (bits * 0x21F0AAAD) & 0xFFFFFFFF
    bits ^= bits >> 15
    bits ^= tl.load(noise_keys + 2 * row + 1)
    bits = (bits * 0x735A2D97) & 0xFFFFFFFF
    bits ^= bits >> 15
    below = tl.maximum((bits.to(tl.float32) + 0.5) * -(2.0**-32), 2.0**-24 - 1.0)
    rest = 1.0 + below  # log(1 + below), exact where `rest` is rounded (Kahan)
    exponential = -tl.where(rest == 1.0, below, tl.log(rest) * below / tl.where(rest == 1.0, 1.0, rest - 1.0))
    score = x - noise_factor * tl.log(exponential)
    largest = tl.max(score)
    log_sum = largest + tl.log(tl.sum(tl.exp(score - largest)))
    top = tl.topk(_sortable(score, rank), PADDED_WIDTH)
    child = tl.arange(0, PADDED_WIDTH)
    of_rank = _index(top)[:, None] == rank[None, :]
    at = row * WIDTH + child
    tl.store(tokens + at, tl.sum(tl.where(of_rank, token[None, :], 0), 1), child < WIDTH)
    tl.store(log_probs + at, _number(top) - log_sum, child < WIDTH)


@triton.jit
def _choose(
    paths,
    tokens,
    log_probs,
    branches,
    slots,
    features,
    next_paths,
    next_tokens,
    next_branches,
    next_features,
    chosen,
    level,
    depth,
    size,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PADDED_DEPTH: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One program: a request's likeliest nodes, and some numbers of their features."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    candidate = tl.arange(0, CANDIDATES)
    here = candidate < WIDTH * CHILDREN
    path = tl.load(paths + request * WIDTH + candidate // CHILDREN, here, -float("inf"))
    path += tl.load(log_probs + request * WIDTH * CHILDREN + candidate, here, 0.0)
    keys = tl.where(here, _sortable(path, candidate), LEAST)
    keys = tl.topk(keys, PADDED_WIDTH)
    node = tl.arange(0, PADDED_WIDTH)
    real = node < WIDTH
    best = _index(keys)
    parent = request * WIDTH + best // CHILDREN
    row = request * WIDTH + node
    if part == 0:
        tl.store(next_paths + row, _number(keys), real)
        tl.store(chosen + row, best.to(tl.int64), real)
        tl.store(next_tokens + row, tl.load(tokens + request * WIDTH * CHILDREN + best, real, 0), real)
        above = tl.arange(0, PADDED_DEPTH)
        inside = real[:, None] & (above < depth)[None, :]
        slot = tl.load(branches + parent[:, None] * depth + above[None, :], inside, 0)
        own = tl.load(slots + row, real, 0).to(tl.int32)
        slot = tl.where((above == level)[None, :], own[:, None], slot)
        tl.store(next_branches + row[:, None] * depth + above[None, :], slot, inside)
    number = part * FEATURES + tl.arange(0, FEATURES)
    wanted = real[:, None] & (number < size)[None, :]
    feature = tl.load(features + parent[:, None] * size + number[None, :], wanted, 0.0)
    tl.store(next_features + row[:, None] * size + number[None, :], feature, wanted)
