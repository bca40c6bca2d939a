"""What follows the network in a level of a chain, by torch's operators: the target's draws are predicted, and the
likeliest nodes chosen, from what is on the device. Nothing waits, so a graph can hold it.

Draws are predicted as `predict_draws` does, for requests whose draws no mask, bias or penalty changes. On a GPU there
are kernels for the same functions: `paceline.drafting.draw_kernels`.

Shapes: R rows, V columns of logits, K children of a row; N requests with W rows each; D levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.noise import gumbel, mix
from paceline.core.sampling import LOWEST_TEMPERATURE, TOP_P_UNITS
from paceline.drafting.draw_prediction import SHORTLIST_SIZE

UNFILTERED = 2 * TOP_P_UNITS
"""More than all probability: top-p then keeps every token."""


def draw_params(requests: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """[5, requests]: temperature; the factor of the noise, 0 for temperature 0; the least logit of min-p, relative to
    the largest; the last rank of top-k; the probability of top-p, in TOP_P_UNITS."""
    return np.array([_numbers(params) for params in requests]).T


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    last = SHORTLIST_SIZE - 1
    if params.greedy:
        return 1.0, 0.0, -math.inf, last, UNFILTERED
    return (
        max(params.temperature, LOWEST_TEMPERATURE),
        1.0,
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        min(params.top_k - 1, last) if params.top_k > 0 else last,
        math.ceil(params.top_p * TOP_P_UNITS) if params.top_p < 1 else UNFILTERED,
    )


def predict(
    logits_RV: Tensor, keys_R2: Tensor, params_5R: Tensor, ids_V: Tensor | None, tokens_RK: Tensor, log_probs_RK: Tensor
) -> None:
    """Write the K likeliest results of each row's draw, int64, and their log-probabilities, float32.

    keys_R2: int64, the halves of `position_key`. params_5R: float64, see `draw_params`. `ids_V`: see `top_scores`. A
    token that a filter leaves out has -inf.
    """
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
    """The W likeliest children of each request's W nodes, at depth `level` + 1: their path log-probabilities [N, W],
    tokens [N * W], branches, and features, which are their parents'.

    path_log_probs float32 [N, W]. tokens int64, log_probs float32 [N, W, K]: the children. branches int32
    [N * W, D - 1]: the slots of each node's path. slots int64 [N * W]: of the nodes that are chosen. features
    [N * W, h]. Writes to `chosen` [N, W] which of the W * K children they are.
    """
    requests, width, children = log_probs.shape
    path_log_probs, best = (path_log_probs.unsqueeze(-1) + log_probs).flatten(1).topk(width)
    chosen.copy_(best)
    first = torch.arange(0, requests * width, width, device=best.device).unsqueeze(1)
    parents = (best // children + first).flatten()
    branches = branches.index_select(0, parents)
    branches[:, level].copy_(slots)
    features = None if features is None else features.index_select(0, parents)
    return path_log_probs, tokens.flatten(1).gather(1, best).flatten(), branches, features
