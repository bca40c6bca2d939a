"""Drafting with an MLP speculator: every guess changes the state that the next one is guessed from.

A node is *expanded* by one step of the network: from its parent's state and its own token come its state and the law
of its children. A round goes down level by level, the likeliest nodes of all requests together, until it has computed
as many rows as a round may.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.sampling import History
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.draw_prediction import RankedTokens, predict_draws
from paceline.drafting.heads.mlp_network import MlpChainNetwork
from paceline.drafting.speculator import Opening
from paceline.drafting.stateless_heads import MAX_ROWS, StatelessDraft, StatelessSpeculator
from paceline.model.target_weights import TargetWeights

DraftNode = tuple["MlpDraft", int]


@dataclass(slots=True, eq=False)
class MlpDraft(StatelessDraft):
    """The states of the nodes that were expanded from the target's latest."""

    known: int = 0
    """Tokens that the network can be fed with are below this."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """What the children of expanded nodes are fed with."""
    frontier: list[int] = field(default_factory=list)
    """The nodes that are not expanded and may be, likeliest first."""

    def root_moved(self, committed: CommitResult) -> None:
        """The states came of another one than the target's latest."""
        self.states.clear()

    def restart(self) -> None:
        self.frontier = [
            node
            for node, parent in enumerate(self.tree.parents)
            if node not in self.states and (node == ROOT or parent in self.states) and self.may_expand(node)
        ]
        if self.root_state is None:
            self.frontier.clear()
        self.frontier.sort(key=self.tree.path_log_probs.__getitem__, reverse=True)

    def may_expand(self, node: int) -> bool:
        return self.tree.tokens[node] < self.known and StatelessDraft.may_expand(self, node)

    def expandable(self, width: int) -> Sequence[int]:
        """As many of the frontier as the tree has room for a child of, if all but the last get `width` of them."""
        return self.frontier[: -(-self.nodes_left // width)]

    def input_state(self, node: int) -> Tensor:
        """What this node is expanded from, before it is the network's own: the target's state, or its parent's."""
        state = self.state if node == ROOT else self.states[self.tree.parents[node]]
        assert state is not None, "a node was expanded before its request's state had come"
        return state

    def extend(self, node: int, state: Tensor, law: RankedTokens) -> list[int]:
        """It was expanded; its new children. Those that it had may be expanded now, too."""
        self.states[node] = state
        new = [self.tree.add(node, *guess) for guess in self.new_children(node, law)[: self.nodes_left]]
        self.restart()
        return new


class MlpSpeculator(StatelessSpeculator[MlpDraft]):
    """Method `mlp_speculator`."""

    method = "mlp_speculator"

    def __init__(
        self, network: MlpChainNetwork, lent: TargetWeights, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """See `StatelessSpeculator`."""
        super().__init__(network.model, lent, tree_width, least_path_probability)
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> MlpDraft:
        return MlpDraft(
            opening, tree, history, floor, max_depth=self._network.steps, known=self._network.vocabulary_limit
        )

    def draft_round(self) -> Iterator[tuple[MlpDraft, list[int]]]:
        left = MAX_ROWS
        while left and (level := list(itertools.islice(self._likeliest(), left))):
            left -= len(level)
            for step, guesses in itertools.groupby(sorted(level, key=_step), key=_step):
                yield from self._expand(step, list(guesses))
        self._ran = left < MAX_ROWS

    def _likeliest(self) -> Iterator[DraftNode]:
        """What all requests could have expanded, best first."""
        offers = (zip(itertools.repeat(draft), draft.expandable(self._width)) for draft in self._drafts.values())
        return heapq.merge(*offers, key=_unlikeliness)

    def _expand(self, step: int, guesses: Sequence[DraftNode]) -> Iterator[tuple[MlpDraft, list[int]]]:
        """One step of the network over nodes of one depth."""
        fed = torch.stack([draft.input_state(node) for draft, node in guesses])
        tokens = torch.tensor([draft.tree.tokens[node] for draft, node in guesses], device=fed.device)
        logits, states = self._network.step(step, self._network.begin(fed) if step == 0 else fed, tokens)
        told = predict_draws(logits, [draft.draw_row(node) for draft, node in guesses], self._width, self._network.ids)
        for (draft, node), state, law in zip(guesses, states, told, strict=True):
            yield draft, draft.extend(node, state, law)


def _step(guess: DraftNode) -> int:
    draft, node = guess
    return draft.tree.depths[node]


def _unlikeliness(guess: DraftNode) -> float:
    draft, node = guess
    return -draft.tree.path_log_probs[node]
