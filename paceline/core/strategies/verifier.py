"""What every verification strategy is given, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.sampling import SamplingRow
from paceline.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class VerificationInput:
    """One request in a step: its tree, the nodes that had rows in the pass, parents before children, and what the
    target draws with after the root and after each node, in this order."""

    tree: TokenTree
    verified: Sequence[int]
    rows: Sequence[SamplingRow]
    tokens: Sequence[int]
    """Prompt and output; the last one is the root."""


class Verifier(ABC):
    """Decides what is committed. It may remember requests, by their histories, but draws by keyed noise only."""

    @abstractmethod
    def verify(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> list[list[int]]:
        """What each request commits: accepted tokens, each that of a verified node under the one before, and one more
        token, whatever it is. Never empty. `logits_RV` are those of all requests' rows; they are left as they are."""


def sampling_rows(guessed: Sequence[VerificationInput]) -> list[SamplingRow]:
    return [row for each in guessed for row in each.rows]
