"""What a head computes, whatever its kind: rows of tokens and features in, logits and features out.

A head drafts from what the target has computed already (EAGLE, MTP). In its row for the token at position i + 1 goes
the target's hidden state of position i, and it predicts the token at i + 2; the row's own position is i. For a token
that is only guessed there is no such state yet; what the head made of the row before takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.model.rows import Row


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """`logits` [wanted rows, columns], `features` [wanted rows, h]: what the rows of their children are fed with."""

    logits: Tensor
    features: Tensor


class HeadNetwork(Protocol):
    """One head's weights, over keys and values of its own in slots 1 to `slots`."""

    model: str
    hidden_state_layers: Sequence[int]
    """Of the target, as in `Speculator`."""
    slots: int
    position_limit: int
    ids: Tensor | None
    """int64 [columns]: the target's token of each logit; None: column n is token n."""

    def encode(self, states: Tensor) -> Tensor:
        """The target's hidden states [n, layers, H] as features [n, h]."""

    def run(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        """One pass. `features` [rows, h]; logits and features come for the rows indexed by `wanted`, in that order."""
