"""Relaxed acceptance while a model thinks: `use_relaxed_acceptance_for_thinking`, as TensorRT-LLM has it.

    between the token that begins a thinking phase and the one that ends it, accept x if it is one of the target's
    `relaxed_topk` most probable tokens and its probability is within `relaxed_delta` of the largest

Probabilities are those that the target draws from; at temperature 0, where the largest would have 1, those of
temperature 1. Everywhere else the target's draws decide. Lossy inside thinking phases, and so in what follows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from paceline.sampling import History, Row, probabilities
from paceline.strategies.base import Guessed, all_rows
from paceline.strategies.lenient import Lenient, Place, tested
from paceline.tree import ROOT


@dataclass(slots=True)
class _Phase:
    """Whether a request thinks after the first `seen` of its tokens."""

    seen: int = 0
    thinks: bool = False


class RelaxedThinking(Lenient):
    def __init__(self, begin_token: int, end_token: int, topk: int, delta: float) -> None:
        self._turns = {begin_token: True, end_token: False}
        self._topk = topk
        self._delta = delta
        self._phases: WeakKeyDictionary[History, _Phase] = WeakKeyDictionary()

    def admit(self, logits_RV: Tensor, guessed: Sequence[Guessed]) -> Mapping[Place, float]:
        inside = {(i, node) for i, each in enumerate(guessed) if each.verified for node in self._inside(each)}
        guesses = [each for each in tested(guessed) if each.place in inside]
        if not guesses:
            return {}
        rows = all_rows(guessed)
        wanted = [each.row for each in guesses]
        target_NV = probabilities(logits_RV[wanted], [_warm(rows[row]) for row in wanted])
        probs = target_NV[range(len(guesses)), [each.token for each in guesses]].tolist()
        least = self._least(target_NV).tolist()
        return {each.place: p for each, p, enough in zip(guesses, probs, least, strict=True) if 0 < p >= enough}

    def _least(self, target_NV: Tensor) -> Tensor:
        """The smallest probability of a token that is accepted, [N]."""
        largest_NK = target_NV.topk(min(self._topk, target_NV.shape[-1])).values
        return largest_NK[:, -1].maximum(largest_NK[:, 0] - self._delta)

    def _inside(self, guessed: Guessed) -> list[int]:
        """The verified nodes whose parents are in a thinking phase."""
        tree, thinks = guessed.tree, {ROOT: self._thinks(guessed)}
        inside = []
        for node in guessed.verified:
            if (parent := tree.parents[node]) in thinks:
                thinks[node] = self._turns.get(tree.tokens[node], thinks[parent])
                inside += [node] if thinks[parent] else []
        return inside

    def _thinks(self, guessed: Guessed) -> bool:
        phase = self._phases.setdefault(guessed.rows[0].history, _Phase())
        for token in guessed.tokens[phase.seen :]:
            phase.thinks = self._turns.get(token, phase.thinks)
        phase.seen = len(guessed.tokens)
        return phase.thinks


def _warm(row: Row) -> Row:
    if not row.params.greedy:
        return row
    return row._replace(params=row.params.model_copy(update={"temperature": 1.0}))
