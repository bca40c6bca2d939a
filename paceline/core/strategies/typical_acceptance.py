"""`typical-acceptance`: a guess stands that is not too improbable for how uncertain the target is there.

    accept x if target_probs[x] > min(threshold, alpha * exp(-entropy))

(Cai et al. 2024, Medusa; Hewitt et al. 2022.) At temperature 0 that is the largest logit alone. Lossy otherwise: which
token comes depends on the draft, and improbable ones come more seldom than the target would draw them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.sampling import probabilities
from paceline.core.strategies.lossy import LossyTreeVerifier, NodeKey, tested_nodes
from paceline.core.strategies.verifier import VerificationInput, sampling_rows


class TypicalAcceptance(LossyTreeVerifier):
    def __init__(self, threshold: float, alpha: float) -> None:
        """`posterior_threshold` and `posterior_alpha`."""
        self._threshold = threshold
        self._alpha = alpha

    def accepted_nodes(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> Mapping[NodeKey, float]:
        guesses = tested_nodes(guessed)
        if not guesses:
            return {}
        target_RV = probabilities(logits_RV, sampling_rows(guessed))
        rows, tokens = [each.row for each in guesses], [each.token for each in guesses]
        probs, least = target_RV[rows, tokens].tolist(), self._thresholds(target_RV)[rows].tolist()
        return {each.place: p for each, p, enough in zip(guesses, probs, least, strict=True) if p > enough}

    def _thresholds(self, target_RV: Tensor) -> Tensor:
        """What a token's probability has to exceed, [R]."""
        entropy_R = torch.special.entr(target_RV).sum(-1)
        return (self._alpha * torch.exp(-entropy_R)).clamp(max=self._threshold)
