"""What the lossy rules that walk trees share: a guess may be accepted although the target did not draw it.

The longest path counts on which each node is either the target's own draw after its parent, as in `coupled`, or
admitted by the rule; of several as long, the one that is most probable, where a draw counts as certain. The target's
draw after its last node ends the commit. Where a rule admits nothing, this is `coupled`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from torch import Tensor

from paceline.core.sampling import draw
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT

NodeKey = tuple[int, int]
"""A verified node: which of the step's requests it is of, and its number there."""


class LossyTreeVerifier(Verifier):
    @abstractmethod
    def accepted_nodes(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> Mapping[NodeKey, float]:
        """The verified nodes that are accepted if their parents are, each with the target's probability of it."""

    def verify(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> list[list[int]]:
        draws = iter(draw(logits_RV, sampling_rows(guessed)).tolist())
        admitted: list[dict[int, float]] = [{} for _ in guessed]
        for (i, node), p in self.accepted_nodes(logits_RV, guessed).items():
            admitted[i][node] = p
        return [
            longest_accepted_path(each, list(islice(draws, len(each.rows))), its)
            for each, its in zip(guessed, admitted, strict=True)
        ]


def longest_accepted_path(guessed: VerificationInput, draws: Sequence[int], admitted: Mapping[int, float]) -> list[int]:
    """The accepted tokens, then the bonus token."""
    tree = guessed.tree
    draw_after = dict(zip((ROOT, *guessed.verified), draws, strict=True))
    reached: dict[int, tuple[int, float]] = {ROOT: (0, 0.0)}
    for node in guessed.verified:
        parent = tree.parents[node]
        if parent not in reached:
            continue
        depth, log_prob = reached[parent]
        if draw_after[parent] == tree.tokens[node]:
            reached[node] = depth + 1, log_prob
        elif node in admitted:
            reached[node] = depth + 1, log_prob + math.log(admitted[node])
    end = max(reached, key=reached.__getitem__)
    return [*tree.path_tokens(end), draw_after[end]]


@dataclass(frozen=True, slots=True)
class TestedNode:
    """A guess that a rule looks at: its place, its token, and the row of its parent among all rows."""

    place: NodeKey
    token: int
    row: int


def tested_nodes(guessed: Sequence[VerificationInput]) -> list[TestedNode]:
    """Each verified node whose parent has a row."""
    first_rows = accumulate((len(each.rows) for each in guessed[:-1]), initial=0)
    found = []
    for i, (each, first) in enumerate(zip(guessed, first_rows, strict=True)):
        rows = dict(zip((ROOT, *each.verified), count(first)))
        for node in each.verified:
            if (row := rows.get(each.tree.parents[node])) is not None:
                found.append(TestedNode((i, node), each.tree.tokens[node], row))
    return found
