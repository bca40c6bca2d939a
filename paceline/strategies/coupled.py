"""`coupled`, and `greedy`, which draws with another temperature: the target's own draws decide (`paceline.verify`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from paceline.sampling import draw
from paceline.strategies.base import Guessed, Verifier, all_rows
from paceline.verify import walk


class Coupled(Verifier):
    def verify(self, logits_RV: Tensor, guessed: Sequence[Guessed]) -> list[list[int]]:
        draws = iter(draw(logits_RV, all_rows(guessed)).tolist())
        return [walk(each.tree, each.verified, list(islice(draws, len(each.rows)))) for each in guessed]
