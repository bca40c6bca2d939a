"""`paceline.drafting.draw_kernels` by torch's operators. Nothing waits, so a graph can hold them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.noise import gumbel, mix
from paceline.core.sampling import TOP_P_UNITS
from paceline.drafting.draw_prediction import SHORTLIST_SIZE


def predict(
    logits_RV: Tensor, keys_R2: Tensor, params_5R: Tensor, ids_V: Tensor | None, tokens_RK: Tensor, log_probs_RK: Tensor
) -> None:
    count = min(SHORTLIST_SIZE, logits_RV.shape[-1])
    temperature, noise, least, last_rank, mass = params_5R.unsqueeze(-1)
    logits, tokens = logits_RV.float().topk(count)
    if ids_V is not None:
        tokens = ids_V[tokens]
    logits = (logits - logits[:, :1]) / temperature.float()
    logits = logits.masked_fill(logits < least.float(), -math.inf)
    logits = _kept(logits, last_rank.long().clamp(max=count - 1))
    summed = (logits + logits.log_softmax(-1)[:, :1]).exp().mul(TOP_P_UNITS).long().cumsum(-1)
    logits = _kept(logits, (summed < mass.long()).sum(-1, keepdim=True).clamp(max=count - 1))
    logits = logits + noise.float() * gumbel(mix(tokens ^ keys_R2[:, :1], keys_R2[:, 1:]))
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    children = tokens_RK.shape[-1]
    tokens_RK.copy_(tokens.gather(-1, order)[:, :children])
    log_probs_RK.copy_(logits.log_softmax(-1)[:, :children])


def _kept(logits: Tensor, last: Tensor) -> Tensor:
    """Only what is as large as the logit of this rank, [R, 1]. They fall."""
    return logits.masked_fill(logits < logits.gather(-1, last), -math.inf)


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
    requests, width, children = log_probs.shape
    path_log_probs, best = (path_log_probs.unsqueeze(-1) + log_probs).flatten(1).topk(width)
    chosen.copy_(best)
    first = torch.arange(0, requests * width, width, device=best.device).unsqueeze(1)
    parents = (best // children + first).flatten()
    branches = branches.index_select(0, parents)
    branches[:, level].copy_(slots)
    features = None if features is None else features.index_select(0, parents)
    return path_log_probs, tokens.flatten(1).gather(1, best).flatten(), branches, features
