"""Predicts the target's draws on a device, from parameters that are there: nothing waits, so a graph can hold it.

As `predict_draws`, for requests whose draws no mask, bias or penalty changes.

Shapes: R rows, V columns of logits, K tokens of the shortlist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.noise import gumbel, mix
from paceline.core.sampling import LOWEST_TEMPERATURE, TOP_P_UNITS
from paceline.drafting.draw_prediction import SHORTLIST_SIZE

UNFILTERED = 2 * TOP_P_UNITS
"""More than all probability: top-p then keeps every token."""


class DrawParams(NamedTuple):
    """How each row's token is drawn, [R, 1] each.

    temperature, noise float32: the factor of the noise, 0 for temperature 0. least_logit float32: of min-p, for logits
    relative to the largest. last_rank int64: of top-k. mass int64: of top-p, in TOP_P_UNITS.
    """

    temperature: Tensor
    noise: Tensor
    least_logit: Tensor
    last_rank: Tensor
    mass: Tensor

    @staticmethod
    def columns(requests: Sequence[SamplingParams]) -> list[list[float]]:
        """The numbers of the five tensors, by request."""
        return [list(column) for column in zip(*map(_numbers, requests), strict=True)]


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


def predict_on_device(
    logits_RV: Tensor, keys_R2: Tensor, params: DrawParams, width: int, ids_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `width` likeliest results of each row's draw, int64 [R, width], and their log-probabilities, float32.

    keys_R2: int64, the halves of `position_key`. A token that a filter leaves out has -inf. `ids_V`: see `top_scores`.
    """
    logits_RK, tokens_RK = logits_RV.float().topk(min(SHORTLIST_SIZE, logits_RV.shape[-1]))
    if ids_V is not None:
        tokens_RK = ids_V[tokens_RK]
    scores_RK = _filtered((logits_RK - logits_RK[:, :1]) / params.temperature, params)
    scores_RK += params.noise * gumbel(mix(tokens_RK ^ keys_R2[:, :1], keys_R2[:, 1:]))
    scores_RK, order_RK = scores_RK.sort(dim=-1, descending=True, stable=True)
    return tokens_RK.gather(-1, order_RK)[:, :width], scores_RK.log_softmax(-1)[:, :width]


def _filtered(logits_RK: Tensor, params: DrawParams) -> Tensor:
    """min-p, then top-k, then top-p. `logits_RK` fall, from 0."""
    last = logits_RK.shape[-1] - 1
    logits_RK = logits_RK.masked_fill(logits_RK < params.least_logit, -math.inf)
    logits_RK = _kept(logits_RK, params.last_rank.clamp(max=last))
    mass_RK = (logits_RK + logits_RK.log_softmax(-1)[:, :1]).exp().mul(TOP_P_UNITS).long().cumsum(-1)
    return _kept(logits_RK, (mass_RK < params.mass).sum(-1, keepdim=True).clamp(max=last))


def _kept(logits_RK: Tensor, last_R1: Tensor) -> Tensor:
    """Only what is as large as the logit of this rank."""
    return logits_RK.masked_fill(logits_RK < logits_RK.gather(-1, last_R1), -math.inf)
