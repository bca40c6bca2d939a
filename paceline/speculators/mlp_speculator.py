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
from paceline.tree import Node, TokenTree

Guess = tuple["ChainDraft", Node]


@dataclass(slots=True, eq=False)
class ChainDraft(StateDraft):
    """The states of the nodes that were expanded from the target's latest."""

    known: int = 0
    """Tokens that the network can be fed with are below this."""
    at: int = -1
    """The root's position when they were."""
    states: dict[Node, Tensor] = field(default_factory=dict)
    """What the children of expanded nodes are fed with."""
    frontier: list[Node] = field(default_factory=list)
    """The nodes that are not expanded and may be, likeliest first."""

    def restart(self) -> None:
        if self.at != self.tree.root.position:
            self.states.clear()
        self.at = self.tree.root.position
        self.frontier.clear()
        reached = [self.tree.root] if self.ready is not None else []
        while reached:
            node = reached.pop()
            if node in self.states:
                reached += node.children.values()
            elif self.may_expand(node):
                self.frontier.append(node)
        self.frontier.sort(key=_unlikeliness)

    def may_expand(self, node: Node) -> bool:
        return node.token < self.known and StateDraft.may_expand(self, node)

    def expandable(self, width: int) -> Sequence[Node]:
        """As many of the frontier as the tree has room for a child of, if all but the last get `width` of them."""
        return self.frontier[: -(-self.room // width)]

    def fed(self, node: Node) -> Tensor:
        """What this node is expanded from, before it is the network's own: the target's state, or its parent's."""
        state = self.state if node.parent is None else self.states[node.parent]
        assert state is not None, "a node was expanded before its request's state had come"
        return state

    def extend(self, node: Node, state: Tensor, law: Law) -> list[Node]:
        """It was expanded; its new children. Those that it had may be expanded now, too."""
        self.states[node] = state
        new = [self.tree.add(node, *guess) for guess in self.wanted(node, law)[: self.room]]
        self.frontier.remove(node)
        self.frontier += filter(self.may_expand, node.children.values())
        self.frontier.sort(key=_unlikeliness)
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

    def guess(self) -> Iterator[tuple[ChainDraft, list[Node]]]:
        left = MOST_ROWS
        while left and (level := list(itertools.islice(self._likeliest(), left))):
            left -= len(level)
            for step, guesses in itertools.groupby(sorted(level, key=_step), key=_step):
                yield from self._expand(step, list(guesses))
        self._ran = left < MOST_ROWS

    def _likeliest(self) -> Iterator[Guess]:
        """What all requests could have expanded, best first."""
        offers = (zip(itertools.repeat(draft), draft.expandable(self._width)) for draft in self._drafts.values())
        return heapq.merge(*offers, key=_unlikeliness_of)

    def _expand(self, step: int, guesses: Sequence[Guess]) -> Iterator[tuple[ChainDraft, list[Node]]]:
        """One step of the network over nodes of one depth."""
        fed = torch.stack([draft.fed(node) for draft, node in guesses])
        tokens = torch.tensor([node.token for _, node in guesses], device=fed.device)
        logits, states = self._network.step(step, self._network.begin(fed) if step == 0 else fed, tokens)
        told = predicted(logits, [draft.draw_row(node) for draft, node in guesses], self._width, self._network.ids)
        for (draft, node), state, law in zip(guesses, states, told, strict=True):
            yield draft, draft.extend(node, state, law)


def _step(guess: Guess) -> int:
    draft, node = guess
    return draft.depth(node)


def _unlikeliness(node: Node) -> float:
    return -node.path_log_prob


def _unlikeliness_of(guess: Guess) -> float:
    return -guess[1].path_log_prob
