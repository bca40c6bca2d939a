"""What the lossy rules that walk trees share: a guess may be accepted although the target did not draw it.

The longest path counts on which each node is either the target's own draw after its parent, as in `coupled`, or
admitted by the rule; of several as long, the one that is most probable, where a draw counts as certain. The target's
draw after its last node ends the commit. Where a rule admits nothing, this is `coupled`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice

from torch import Tensor

from paceline.sampling import draw
from paceline.strategies.base import Guessed, Verifier, all_rows
from paceline.tree import Node


class Lenient(Verifier):
    @abstractmethod
    def admit(self, logits_RV: Tensor, guessed: Sequence[Guessed]) -> Mapping[Node, float]:
        """The verified nodes that are accepted if their parents are, each with the target's probability of it."""

    def verify(self, logits_RV: Tensor, guessed: Sequence[Guessed]) -> list[list[int]]:
        draws = iter(draw(logits_RV, all_rows(guessed)).tolist())
        admitted = self.admit(logits_RV, guessed)
        return [longest(each, list(islice(draws, len(each.rows))), admitted) for each in guessed]


def longest(guessed: Guessed, draws: Sequence[int], admitted: Mapping[Node, float]) -> list[int]:
    """The accepted tokens, then the bonus token."""
    draw_after = dict(zip([guessed.root, *guessed.verified], draws, strict=True))
    reached: dict[Node, tuple[int, float]] = {guessed.root: (0, 0.0)}
    for node in guessed.verified:
        if node.parent not in reached:
            continue
        depth, log_prob = reached[node.parent]
        if draw_after[node.parent] == node.token:
            reached[node] = depth + 1, log_prob
        elif node in admitted:
            reached[node] = depth + 1, log_prob + math.log(admitted[node])
    end = max(reached, key=reached.__getitem__)
    return [*(node.token for node in end.path()), draw_after[end]]


def parents(guessed: Sequence[Guessed]) -> list[tuple[int, Node]]:
    """Each verified node, with the index of its parent's row among all rows. One without a parent there is left out."""
    first_rows = accumulate((len(each.rows) for each in guessed[:-1]), initial=0)
    found = []
    for each, first in zip(guessed, first_rows, strict=True):
        place = {node: row for row, node in enumerate([each.root, *each.verified], first)}
        found += [(place[node.parent], node) for node in each.verified if node.parent in place]
    return found
