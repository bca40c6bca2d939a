"""`logit-comparison`: a guess stands that the target finds no less probable than the draft did.

    accept x if log draft_probs[x] - log target_probs[x] <= eps

Lossy: of a token that the draft finds too improbable, the target's surplus is never drawn where a guess stands instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.sampling import probabilities
from paceline.strategies.base import Guessed, all_rows
from paceline.strategies.lenient import Lenient, parents
from paceline.tree import Node


class LogitComparison(Lenient):
    def __init__(self, eps: float) -> None:
        """`logit_comparison_eps`."""
        self._eps = eps

    def admit(self, logits_RV: Tensor, guessed: Sequence[Guessed]) -> Mapping[Node, float]:
        places = parents(guessed)
        if not places:
            return {}
        target_RV = probabilities(logits_RV, all_rows(guessed))
        probs = target_RV[[row for row, _ in places], [node.token for _, node in places]].tolist()
        return {node: p for (_, node), p in zip(places, probs, strict=True) if self._stands(node, p)}

    def _stands(self, node: Node, target_prob: float) -> bool:
        draft_prob = node.law[node.token] / sum(node.law.values()) if node.law else 1.0
        return target_prob > 0 and math.log(draft_prob) - math.log(target_prob) <= self._eps
