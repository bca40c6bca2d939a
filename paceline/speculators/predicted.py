"""What a draft's logits say the target will draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import Row, shortlist

LISTED = 64
"""Tokens of each law among which the target's draw is looked for."""

Law = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, falling."""


def predicted(logits_RV: Tensor, rows: Sequence[Row], width: int, ids_V: Tensor | None = None) -> list[Law]:
    """What each of these draws gives, `width` tokens of each. `ids_V` as for `shortlist`."""
    tokens_RK, scores_RK = shortlist(logits_RV, rows, LISTED, ids_V)
    log_probs_RK = torch.log_softmax(scores_RK, -1)
    chosen, likely = (each[:, :width].tolist() for each in (tokens_RK, log_probs_RK))
    return [list(zip(*law, strict=True)) for law in zip(chosen, likely, strict=True)]
