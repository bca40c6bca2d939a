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

from paceline.core.sampling import History, SamplingRow, probabilities
from paceline.core.strategies.lossy import LossyTreeVerifier, NodeKey, tested_nodes
from paceline.core.strategies.verifier import VerificationInput, sampling_rows
from paceline.core.tree import ROOT


@dataclass(slots=True)
class _ThinkingState:
    """Whether a request thinks after the first `seen` of its tokens."""

    seen: int = 0
    thinks: bool = False


class RelaxedThinking(LossyTreeVerifier):
    def __init__(self, begin_token: int, end_token: int, topk: int, delta: float) -> None:
        self._thinking_after = {begin_token: True, end_token: False}
        self._topk = topk
        self._delta = delta
        self._states: WeakKeyDictionary[History, _ThinkingState] = WeakKeyDictionary()

    def accepted_nodes(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> Mapping[NodeKey, float]:
        inside = {(i, node) for i, each in enumerate(guessed) if each.verified for node in self._thinking_nodes(each)}
        guesses = [each for each in tested_nodes(guessed) if each.place in inside]
        if not guesses:
            return {}
        rows = sampling_rows(guessed)
        wanted = [each.row for each in guesses]
        target_NV = probabilities(logits_RV[wanted], [_at_temperature_one(rows[row]) for row in wanted])
        probs = target_NV[range(len(guesses)), [each.token for each in guesses]].tolist()
        least = self._thresholds(target_NV).tolist()
        return {each.place: p for each, p, enough in zip(guesses, probs, least, strict=True) if 0 < p >= enough}

    def _thresholds(self, target_NV: Tensor) -> Tensor:
        """The smallest probability of a token that is accepted, [N]."""
        largest_NK = target_NV.topk(min(self._topk, target_NV.shape[-1])).values
        return largest_NK[:, -1].maximum(largest_NK[:, 0] - self._delta)

    def _thinking_nodes(self, guessed: VerificationInput) -> list[int]:
        """The verified nodes whose parents are in a thinking phase."""
        tree, thinks = guessed.tree, {ROOT: self._is_thinking(guessed)}
        inside = []
        for node in guessed.verified:
            if (parent := tree.parents[node]) in thinks:
                thinks[node] = self._thinking_after.get(tree.tokens[node], thinks[parent])
                inside += [node] if thinks[parent] else []
        return inside

    def _is_thinking(self, guessed: VerificationInput) -> bool:
        phase = self._states.setdefault(guessed.rows[0].history, _ThinkingState())
        for token in guessed.tokens[phase.seen :]:
            phase.thinks = self._thinking_after.get(token, phase.thinks)
        phase.seen = len(guessed.tokens)
        return phase.thinks


def _at_temperature_one(row: SamplingRow) -> SamplingRow:
    if not row.params.greedy:
        return row
    return row._replace(params=row.params.model_copy(update={"temperature": 1.0}))
