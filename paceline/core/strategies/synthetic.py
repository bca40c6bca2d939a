"""`synthetic_acceptance_rate`, for benchmarks: accept draft tokens with a fixed probability, whatever they are.

Of several siblings, the first one may be accepted. The output means nothing; its speed is that of a draft with this
acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from paceline.core.noise import NoisePurpose, noise_key, uniform
from paceline.core.sampling import draw
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT
from paceline.core.verify import Verdict


def conditional_rate(joint_rate: float, depths: int) -> float:
    """The probability of accepting a token after an accepted one, found by bisection.

    With it, P(all tokens up to a depth are accepted), averaged over `depths` depths, is `joint_rate`.
    """
    low, high = 0.0, 1.0
    while low < (rate := (low + high) / 2) < high:
        mean = sum(rate**depth for depth in range(1, depths + 1)) / depths
        low, high = (rate, high) if mean < joint_rate else (low, rate)
    return high


class SyntheticAcceptance(Verifier):
    def __init__(self, rate: float) -> None:
        """`rate`: of each token, given that the tokens before it were accepted."""
        self._rate = rate

    def verify(self, logits_RV: Tensor, requests: Sequence[VerificationInput]) -> list[Verdict]:
        draws = iter(draw(logits_RV, sampling_rows(requests), self.find).tolist())
        return [self._commit(each, list(islice(draws, len(each.rows)))) for each in requests]

    def _commit(self, request: VerificationInput, draws: Sequence[int]) -> Verdict:
        row_of = {node: row for row, node in enumerate((ROOT, *request.verified))}
        node = ROOT
        while self._accepts(request, row_of[node]):
            child = next((child for child in request.tree.children(node) if child in request.verified), None)
            if child is None:
                break
            node = child
        return Verdict(request.tree.path(node), draws[row_of[node]])

    def _accepts(self, request: VerificationInput, row: int) -> bool:
        sampling = request.rows[row]
        return uniform(noise_key(sampling.params.seed, NoisePurpose.SYNTHETIC, sampling.position)) < self._rate
