"""What several drafts make likely together, where each has its own word on which token comes next.

Each draft is a witness, right with one of its guesses or wrong with all of them, independently of the others. Only one
token comes next, so what cannot be is left out: that two of them are right with different guesses. Then a guess that a
draft gives the probability p, and all its guesses here s, has odds o = p / (1 - s) by this draft; by several the odds
that not all are wrong, which is the product of 1 + o, less 1; and the probability odds / (1 + the sum of the odds of
all guesses). Drafts that agree make a guess likelier, those that contradict each other less likely, and of one alone
p is left as it is.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

LEAST_DOUBT = 1e-3
"""The least probability that is left for a draft's being wrong."""


def together(words: Sequence[Mapping[int, float]]) -> list[float]:
    """`words[i]`: what each draft that made guess i gives it, as a natural log of a probability, by draft.

    Returns the log-probability of each guess. They are finite, and the probabilities sum to less than 1.
    """
    said: defaultdict[int, float] = defaultdict(float)
    for guess in words:
        for draft, log_prob in guess.items():
            said[draft] += math.exp(log_prob)
    doubts = {draft: max(1.0 - chance, LEAST_DOUBT) for draft, chance in said.items()}
    odds = [_not_all_wrong(math.exp(log_prob) / doubts[draft] for draft, log_prob in guess.items()) for guess in words]
    total = 1.0 + sum(odds)
    return [math.log(its / total) for its in odds]


def _not_all_wrong(odds: Iterable[float]) -> float:
    """The product of 1 + o, less 1, without the rounding. Never 0."""
    so_far = 0.0
    for each in odds:
        so_far += each + so_far * each
    return max(so_far, sys.float_info.min)
