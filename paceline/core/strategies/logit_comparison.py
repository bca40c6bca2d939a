"""`logit-comparison`: a guess stands that the target finds no less probable than the draft did.

    accept x if log draft_probs[x] - log target_probs[x] <= eps

Lossy: of a token that the draft finds too improbable, the target's surplus is never drawn where a guess stands instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.core.growth import CERTAIN_TOKEN, DraftDistribution
from paceline.core.sampling import probabilities
from paceline.core.strategies.lossy import LossyTreeVerifier, NodeKey, tested_nodes
from paceline.core.strategies.verifier import VerificationInput, sampling_rows


class LogitComparison(LossyTreeVerifier):
    def __init__(self, eps: float) -> None:
        """`logit_comparison_eps`."""
        self._eps = eps

    def accepted_nodes(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> Mapping[NodeKey, float]:
        guesses = tested_nodes(guessed)
        if not guesses:
            return {}
        target_RV = probabilities(logits_RV, sampling_rows(guessed))
        probs = target_RV[[each.row for each in guesses], [each.token for each in guesses]].tolist()
        laws = [guessed[i].tree.distributions.get(node, CERTAIN_TOKEN) for i, node in (each.place for each in guesses)]
        return {
            each.place: p
            for each, law, p in zip(guesses, laws, probs, strict=True)
            if self._accepts(each.token, law, p)
        }

    def _accepts(self, token: int, law: DraftDistribution, target_prob: float) -> bool:
        draft_prob = law[token] / sum(law.values()) if law else 1.0
        return target_prob > 0 and math.log(draft_prob) - math.log(target_prob) <= self._eps
