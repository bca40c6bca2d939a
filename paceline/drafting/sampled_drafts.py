"""Draft tokens sampled from the draft's own distribution, for strategies that verify with that distribution.

A distribution is sent exactly as it was sampled from: the likeliest tokens, each with an integer weight. So sending
rounds nothing, and every set of weights is a valid distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.core.growth import DraftDistribution
from paceline.core.logits_rules import SamplingRow
from paceline.core.noise import NoisePurpose, noise_key
from paceline.core.sampling import top_probabilities

MAX_LISTED_TOKENS = 64
"""Tokens of a distribution."""
WEIGHT_SUM = 2**16 - 1
"""The approximate sum of a distribution's weights. Each weight fits into 16 bits."""
SAMPLED_DRAFT_SCORE = math.log(0.8)
"""The log-probability given to every sampled draft token. The target learns how often they are accepted at each depth.
It must not depend on the token: if sending, expanding or verifying depended on it, the samples that get verified would
not follow the distribution."""


class SampledToken(NamedTuple):
    token: int
    log_prob: float
    distribution: DraftDistribution


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
