"""`coupled`: the target's own draws decide (`paceline.core.verify`). `greedy` is the same at temperature 0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from paceline.core.sampling import draw
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.verify import Verdict, follow_draws


class Coupled(Verifier):
    def verify(self, logits_RV: Tensor, requests: Sequence[VerificationInput]) -> list[Verdict]:
        draws = iter(draw(logits_RV, sampling_rows(requests), self.find).tolist())
        return [follow_draws(each.tree, each.verified, list(islice(draws, len(each.rows)))) for each in requests]
