"""The interface of a verification strategy, and its input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.logits_rules import SamplingRow
from paceline.core.sampling import FindCandidates
from paceline.core.tree import TokenTree
from paceline.core.verify import Verdict


@dataclass(frozen=True, slots=True)
class VerificationInput:
    """One request of a step."""

    tree: TokenTree
    verified: Sequence[int]
    """The nodes that had rows in the pass, parents before children."""
    rows: Sequence[SamplingRow]
    """What the target draws with after the root and after each verified node, in this order."""
    tokens: Sequence[int]
    """Prompt and output; the last one is the root."""


class Verifier(ABC):
    """Decides what each request commits. It may keep state per request, by `History`; all its noise is keyed."""

    find: FindCandidates | None = None
    """See `draw`."""

    @abstractmethod
    def verify(self, logits_RV: Tensor, requests: Sequence[VerificationInput]) -> list[Verdict]:
        """What each request commits. With `residual` the bonus token may be a guess without a row.

        `logits_RV`: the logits of all requests' rows, in order; they are not modified.
        """


def sampling_rows(requests: Sequence[VerificationInput]) -> list[SamplingRow]:
    """The rows of all requests, in order."""
    return [row for request in requests for row in request.rows]
