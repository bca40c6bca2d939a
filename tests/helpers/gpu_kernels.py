"""Stand-ins on a CPU for the kernels of a GPU, by torch's operators, and for CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.model import torch_attention
from paceline.model.gpu.pass_graphs import Outputs
from paceline.model.gpu.paths import RowPaths

PLANNED = 7
"""What a plan has here: `attend` wants one that was made."""


def write_tables(tables: Tensor, writes: Tensor) -> None:
    tables.index_put_((writes[:, 0].long(), writes[:, 1].long()), writes[:, 2])


def plan(paths: RowPaths) -> Tensor:
    return torch.full_like(paths.groups, PLANNED)


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
    assert plan.shape == paths.groups.shape
    rows, heads, _ = query.shape
    position = torch.arange(paths.tables.shape[1], device=query.device)
    committed, seen, branch = (each.long().unsqueeze(-1) for each in (paths.committed, paths.seen, paths.branch))
    guess = (branch + position - committed).clamp(0, len(paths.branches) - 1)
    slots = torch.where(position < committed, paths.tables[paths.table.long()], paths.branches[guess])
    hidden = position >= seen
    if window:
        hidden |= position < seen - window
    slots = torch.where(hidden, 1, slots).long()
    kv_heads = data.shape[1] // 2
    keys, values = data[slots].float().repeat_interleave(heads // kv_heads, 2).chunk(2, 2)
    scores = torch.einsum("rhd,rnhd->rhn", query.float(), keys) * scale
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(rows, -1).unsqueeze(-1)], -1)
    shares = torch.softmax(scores, -1)[..., : len(position)]
    out = torch.einsum("rhn,rnhd->rhd", torch.nan_to_num(shares), values)
    return out.to(query.dtype).reshape(rows, -1)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x if added is None else x + added
    return total, total if weight is None else F.rms_norm(total, weight.shape, weight, eps)


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
    parts = F.embedding(tokens, embedding), states
    normed = [add_norm(*each, eps)[1] for each in zip(parts, (None, None), (token_norm, state_norm), strict=True)]
    return normed[1] if norms_residual else states, torch.cat(normed, -1)


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
    kv_heads, size = data.shape[1] // 2, projected.shape[-1]
    x, value = projected[:, :-kv_heads].float(), projected[:, -kv_heads:]
    if norms is not None:
        x = F.rms_norm(x, (size,), None, eps) * norms.float()
    at = positions.long()
    x = x * cosines[at].unsqueeze(1).float() + x.roll(size // 2, -1) * sines[at].unsqueeze(1).float()
    data.index_copy_(0, slots.long(), torch.cat([x[:, -kv_heads:].to(data.dtype), value], 1))
    return x[:, :-kv_heads].to(projected.dtype)


def silu_times(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


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
    patch.setattr(torch_attention, "find_kernels", lambda *_: sys.modules[__name__])
    patch.setattr(torch_attention, "CudaCapture", lambda device: capture)
