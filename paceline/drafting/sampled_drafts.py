"""Guesses that a draft draws from its own law, for strategies that want that law beside them.

A law is sent exactly as it was drawn from, bit for bit: the likeliest tokens, each with a whole number in proportion to
which it is drawn. So a law needs no rounding on its way, and none can be written that does not sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.core.growth import DraftDistribution
from paceline.core.sampling import NoisePurpose, SamplingRow, noise_key, top_probabilities

MAX_LISTED_TOKENS = 64
"""Tokens of a law."""
WEIGHT_SUM = 2**16 - 1
"""About what the weights of a law sum to. Each fits into 16 bits."""
SAMPLED_DRAFT_SCORE = math.log(0.8)
"""What every such guess is said to be worth. The target learns how often guesses at each depth are accepted; from the
token nothing may follow for whether it is sent, expanded or verified, or those that are would have another law."""


class SampledToken(NamedTuple):
    token: int
    log_prob: float
    distribution: DraftDistribution


def sample_draft_tokens(
    logits_RV: Tensor, rows: Sequence[SamplingRow], ids_V: Tensor | None = None
) -> list[SampledToken | None]:
    """One guess after each row, drawn from the law that its logits are for these rows' parameters. `ids_V`: as in
    `paceline.core.sampling.top_scores`. None: of the tokens that may come there `ids_V` has none. That follows from the
    tokens before alone, so no law is bent by it.

    The noise is the draft's own, and another for each root that a position is guessed under and each path to it: what a
    guess was refused for may have depended on those after it.
    """
    tokens_RK, probs_RK = top_probabilities(logits_RV, rows, MAX_LISTED_TOKENS, ids_V)
    guesses: list[SampledToken | None] = []
    for row, tokens, probs in zip(rows, tokens_RK.tolist(), probs_RK.tolist(), strict=True):
        law = quantised_distribution(tokens, probs)
        key = noise_key(row.params.seed, NoisePurpose.GUESS, row.position - len(row.path), *row.path)
        guesses.append(SampledToken(draw_token(law, key), SAMPLED_DRAFT_SCORE, law) if law else None)
    return guesses


def quantised_distribution(tokens: Sequence[int], probs: Sequence[float]) -> DraftDistribution:
    """The nearest law that can be sent."""
    weights = {token: round(p * WEIGHT_SUM) for token, p in sorted(zip(tokens, probs, strict=True))}
    return {token: weight for token, weight in weights.items() if weight}


def draw_token(law: DraftDistribution, key: int) -> int:
    """The token that 64 random bits draw: each of them in proportion to its weight."""
    place = key * sum(law.values()) >> 64
    for token, weight in law.items():
        place -= weight
        if place < 0:
            return token
    raise ValueError("a law without weight")
