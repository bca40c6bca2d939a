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

from paceline.model.lending import Lent
from paceline.sampling import History
from paceline.speculators.base import Opening
from paceline.speculators.cacheless import MOST_ROWS, Cacheless, StateDraft
from paceline.speculators.mlp_network import ChainNetwork
from paceline.speculators.predicted import Law, predicted
from paceline.tree import ROOT, Committed, TokenTree

Guess = tuple["ChainDraft", int]


@dataclass(slots=True, eq=False)
class ChainDraft(StateDraft):
    """The states of the nodes that were expanded from the target's latest."""

    known: int = 0
    """Tokens that the network can be fed with are below this."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """What the children of expanded nodes are fed with."""
    frontier: list[int] = field(default_factory=list)
    """The nodes that are not expanded and may be, likeliest first."""

    def move(self, committed: Committed) -> None:
        """The states came of another one than the target's latest."""
        self.states.clear()

    def restart(self) -> None:
        self.frontier = [
            node
            for node, parent in enumerate(self.tree.parents)
            if node not in self.states and (node == ROOT or parent in self.states) and self.may_expand(node)
        ]
        if self.ready is None:
            self.frontier.clear()
        self.frontier.sort(key=self.tree.path_log_probs.__getitem__, reverse=True)

    def may_expand(self, node: int) -> bool:
        return self.tree.tokens[node] < self.known and StateDraft.may_expand(self, node)

    def expandable(self, width: int) -> Sequence[int]:
        """As many of the frontier as the tree has room for a child of, if all but the last get `width` of them."""
        return self.frontier[: -(-self.room // width)]

    def fed(self, node: int) -> Tensor:
        """What this node is expanded from, before it is the network's own: the target's state, or its parent's."""
        state = self.state if node == ROOT else self.states[self.tree.parents[node]]
        assert state is not None, "a node was expanded before its request's state had come"
        return state

    def extend(self, node: int, state: Tensor, law: Law) -> list[int]:
        """It was expanded; its new children. Those that it had may be expanded now, too."""
        self.states[node] = state
        new = [self.tree.add(node, *guess) for guess in self.wanted(node, law)[: self.room]]
        self.restart()
        return new


class MlpSpeculator(Cacheless[ChainDraft]):
    """Method `mlp_speculator`."""

    method = "mlp_speculator"

    def __init__(
        self, network: ChainNetwork, lent: Lent, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """See `Cacheless`."""
        super().__init__(network.model, lent, tree_width, least_path_probability)
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> ChainDraft:
        return ChainDraft(opening, tree, history, floor, longest=self._network.steps, known=self._network.known)

    def guess(self) -> Iterator[tuple[ChainDraft, list[int]]]:
        left = MOST_ROWS
        while left and (level := list(itertools.islice(self._likeliest(), left))):
            left -= len(level)
            for step, guesses in itertools.groupby(sorted(level, key=_step), key=_step):
                yield from self._expand(step, list(guesses))
        self._ran = left < MOST_ROWS

    def _likeliest(self) -> Iterator[Guess]:
        """What all requests could have expanded, best first."""
        offers = (zip(itertools.repeat(draft), draft.expandable(self._width)) for draft in self._drafts.values())
        return heapq.merge(*offers, key=_unlikeliness)

    def _expand(self, step: int, guesses: Sequence[Guess]) -> Iterator[tuple[ChainDraft, list[int]]]:
        """One step of the network over nodes of one depth."""
        fed = torch.stack([draft.fed(node) for draft, node in guesses])
        tokens = torch.tensor([draft.tree.tokens[node] for draft, node in guesses], device=fed.device)
        logits, states = self._network.step(step, self._network.begin(fed) if step == 0 else fed, tokens)
        told = predicted(logits, [draft.draw_row(node) for draft, node in guesses], self._width, self._network.ids)
        for (draft, node), state, law in zip(guesses, states, told, strict=True):
            yield draft, draft.extend(node, state, law)


def _step(guess: Guess) -> int:
    draft, node = guess
    return draft.tree.depths[node]


def _unlikeliness(guess: Guess) -> float:
    draft, node = guess
    return -draft.tree.path_log_probs[node]
