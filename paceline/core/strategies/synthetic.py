"""`synthetic_acceptance_rate`, for benchmarks alone: a guess is accepted with a fixed probability, whatever it is.

Of several at one place that is the first. The output means nothing; how fast it comes is how fast it would come with
drafts that good.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from paceline.core.sampling import NoisePurpose, draw, noise_key, uniform
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT


def conditional_rate(joint_rate: float, depths: int) -> float:
    """The probability with which each guess has to be accepted, given those before it, so that the mean over `depths`
    places of the probability that all up to there are accepted is `joint_rate`."""
    low, high = 0.0, 1.0
    while low < (rate := (low + high) / 2) < high:
        low, high = (rate, high) if _mean_joint_rate(rate, depths) < joint_rate else (low, rate)
    return high


def _mean_joint_rate(rate: float, depths: int) -> float:
    return sum(rate**depth for depth in range(1, depths + 1)) / depths


class SyntheticAcceptance(Verifier):
    def __init__(self, rate: float) -> None:
        """`rate`: of each guess, given those before it."""
        self._rate = rate

    def verify(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> list[list[int]]:
        draws = iter(draw(logits_RV, sampling_rows(guessed)).tolist())
        return [self._commit(each, list(islice(draws, len(each.rows)))) for each in guessed]

    def _commit(self, guessed: VerificationInput, draws: Sequence[int]) -> list[int]:
        row_of = {node: row for row, node in enumerate((ROOT, *guessed.verified))}
        node = ROOT
        while (child := _first_verified_child(guessed, node)) and self._accepts(guessed, row_of[node]):
            node = child
        return [*guessed.tree.path_tokens(node), draws[row_of[node]]]

    def _accepts(self, guessed: VerificationInput, row: int) -> bool:
        drawing = guessed.rows[row]
        return uniform(noise_key(drawing.params.seed, NoisePurpose.SYNTHETIC, drawing.position)) < self._rate


def _first_verified_child(guessed: VerificationInput, node: int) -> int | None:
    return next((child for child in guessed.tree.children(node) if child in guessed.verified), None)
