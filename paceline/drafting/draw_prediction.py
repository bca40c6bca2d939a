"""Predicts the target's draws from a draft's logits, or samples draft tokens from the draft's own distribution.

*Predicted*: the target perturbs its logits with noise that is known in advance (`paceline.core.sampling`) and draws the
largest. A draft perturbs its own logits with the same noise; a softmax over the perturbed logits gives the probability
of each draw. At temperature 0 there is no noise.

*Sampled*: for strategies that verify with the draft's distribution. A distribution is sent exactly as it was sampled
from: the likeliest tokens, each with an integer weight. So sending rounds nothing, and every set of weights is a valid
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.growth import DraftDistribution
from paceline.core.logits_rules import SamplingRow
from paceline.core.noise import NoisePurpose, noise_key
from paceline.core.sampling import LOWEST_TEMPERATURE, TOP_P_UNITS, top_probabilities, top_scores

MAX_ROWS = 256
"""Rows of draft tokens in one round."""
SHORTLIST_SIZE = 64
"""The target's draw is predicted among this many of the likeliest tokens."""

MAX_LISTED_TOKENS = 64
"""Tokens of a distribution."""
WEIGHT_SUM = 2**16 - 1
"""The approximate sum of a distribution's weights. Each weight fits into 16 bits."""
SAMPLED_DRAFT_SCORE = math.log(0.8)
"""The log-probability given to every sampled draft token. The target learns how often they are accepted at each depth.
It must not depend on the token: if sending, expanding or verifying depended on it, the samples that get verified would
not follow the distribution."""

_UNFILTERED = 2 * TOP_P_UNITS
"""More than all probability: top-p then keeps every token."""

RankedTokens = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, likeliest first."""


class SampledToken(NamedTuple):
    token: int
    log_prob: float
    distribution: DraftDistribution


def predict_draws(
    logits_RV: Tensor, rows: Sequence[SamplingRow], width: int, ids_V: Tensor | None = None
) -> list[RankedTokens]:
    """The `width` likeliest results of each row's draw. `ids_V`: see `top_scores`.

    A forbidden token has log-probability -inf; if all of `ids_V` are forbidden, all are NaN. A tree takes neither.
    """
    tokens_RK, scores_RK = top_scores(logits_RV, rows, SHORTLIST_SIZE, ids_V)
    log_probs_RK = torch.log_softmax(scores_RK, -1)
    tokens, log_probs = (each[:, :width].tolist() for each in (tokens_RK, log_probs_RK))
    return [list(zip(*row, strict=True)) for row in zip(tokens, log_probs, strict=True)]


def draw_params(requests: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """What whole drafts on a GPU draw by, [5, requests]: temperature; the factor of the noise, 0 for temperature 0; the
    least logit of min-p, relative to the largest; the last rank of top-k; the probability of top-p, in TOP_P_UNITS."""
    return np.array([_draw_numbers(params) for params in requests]).T


def _draw_numbers(params: SamplingParams) -> tuple[float, ...]:
    last = SHORTLIST_SIZE - 1
    if params.greedy:
        return 1.0, 0.0, -math.inf, last, _UNFILTERED
    return (
        max(params.temperature, LOWEST_TEMPERATURE),
        1.0,
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        min(params.top_k - 1, last) if params.top_k > 0 else last,
        math.ceil(params.top_p * TOP_P_UNITS) if params.top_p < 1 else _UNFILTERED,
    )


def sample_draft_tokens(
    logits_RV: Tensor, rows: Sequence[SamplingRow], ids_V: Tensor | None = None
) -> list[SampledToken | None]:
    """One token after each row, sampled with the row's parameters. `ids_V`: see `paceline.core.sampling.top_scores`.

    None: all of `ids_V` are forbidden after this row. That depends on the tokens before only, so no distribution is
    changed. The noise is independent of the target's, and differs between roots and paths of the same position: a
    rejection may have depended on the tokens after.
    """
    tokens_RK, probs_RK = top_probabilities(logits_RV, rows, MAX_LISTED_TOKENS, ids_V)
    samples: list[SampledToken | None] = []
    for row, tokens, probs in zip(rows, tokens_RK.tolist(), probs_RK.tolist(), strict=True):
        distribution = quantised_distribution(tokens, probs)
        key = noise_key(row.params.seed, NoisePurpose.GUESS, row.position - len(row.path), *row.path)
        sample = (
            SampledToken(draw_token(distribution, key), SAMPLED_DRAFT_SCORE, distribution) if distribution else None
        )
        samples.append(sample)
    return samples


def quantised_distribution(tokens: Sequence[int], probs: Sequence[float]) -> DraftDistribution:
    """The nearest distribution with integer weights."""
    weights = {token: round(prob * WEIGHT_SUM) for token, prob in sorted(zip(tokens, probs, strict=True))}
    return {token: weight for token, weight in weights.items() if weight}


def draw_token(distribution: DraftDistribution, key: int) -> int:
    """The token that 64 random bits select, each with a probability proportional to its weight."""
    remaining = key * sum(distribution.values()) >> 64
    for token, weight in distribution.items():
        remaining -= weight
        if remaining < 0:
            return token
    raise ValueError("the distribution has no weight")
