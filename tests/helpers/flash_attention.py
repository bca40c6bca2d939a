"""A stand-in for flash-attn 3 on a CPU, and one for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.model import paged_attention, torch_attention
from paceline.model.paged_attention import FLASH_ATTN, AttentionKernel
from paceline.model.pass_graphs import Outputs


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    num_splits: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    """What `hopper/flash_attn_interface.py` documents of it, without a causal mask, in float32: q [batch, n, heads, D]
    → [batch, n, heads, D] and log-sum-exps [batch, heads, n]; or, with `cu_seqlens_q` int32 [batch + 1], q
    [total, heads, D] → [total, heads, D] and [heads, total]. Caches: [pages, page size, key-value heads, D]."""
    assert (num_splits, return_softmax_lse) == (1, True), "sums would depend on other rows"
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    assert len(page_table) == len(cache_seqlens) == batch
    assert page_table.stride(-1) == 1
    assert cache_seqlens.is_contiguous()
    assert isinstance(softmax_scale, float)
    assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
    if cu_seqlens_q is None:
        count = q.shape[1]
        out, weight = _rows(q.flatten(0, 1), torch.arange(batch).repeat_interleave(count), k_cache, v_cache,
                            cache_seqlens, page_table, softmax_scale, softcap)  # fmt: skip
        return out.unflatten(0, (batch, count)), weight.unflatten(0, (batch, count)).transpose(1, 2)
    assert cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == len(q)
    # Of sequences that begin at the same row, the last one has it.
    sequence = torch.searchsorted(cu_seqlens_q, torch.arange(len(q), dtype=torch.int32), right=True) - 1
    out, weight = _rows(q, sequence, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, softcap)
    return out, weight.T


def _rows(
    q: Tensor,
    sequence: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """q [n, heads, D], each row with its sequence, → [n, heads, D] and [n, heads]."""
    table = page_table.long()[sequence]
    groups = q.shape[1] // k_cache.shape[2]
    keys, values = (cache[table].flatten(1, 2).repeat_interleave(groups, 2).float() for cache in (k_cache, v_cache))
    scores = (q.unsqueeze(1).float() * keys).sum(-1) * scale  # [n, positions, heads]
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    hidden = torch.arange(scores.shape[1]) >= lengths[sequence].unsqueeze(-1)
    scores = scores.masked_fill(hidden.unsqueeze(-1), -torch.inf)
    values = values.masked_fill(hidden[..., None, None], 0.0)
    weight = torch.logsumexp(scores, 1)
    out = (torch.nan_to_num(torch.softmax(scores, 1)).unsqueeze(-1) * values).sum(1)
    # Rows that see nothing have zeros. What their log-sum-exp is, the function does not say: so it is no number here.
    return out.to(q.dtype), torch.where(weight == -torch.inf, torch.nan, weight).float()


class _Recorder(TorchDispatchMode):
    """Keeps every operator that is called, with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


def capture(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """As a CUDA graph: a replay calls the same operators on the same memory, whatever Python would do now."""
    with _Recorder() as recorder:
        outputs = run()

    @torch.inference_mode()
    def replay() -> None:
        for function, args, kwargs, result in recorder.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay, outputs


def use_stand_ins(patch: pytest.MonkeyPatch) -> None:
    """For models that are made meanwhile."""
    kernel = AttentionKernel(FLASH_ATTN, flash_attn_with_kvcache)
    patch.setattr(paged_attention, "find_kernels", lambda *_: [kernel])
    patch.setattr(torch_attention, "CudaCapture", lambda device: capture)
