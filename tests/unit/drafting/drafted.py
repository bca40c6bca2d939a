"""The target's side of one drafted request: the test chooses the tokens, the tree is built from the draft's growth."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.growth import Growth
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import draw
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.speculator import Commit, Limit, Opening, Speculator
from paceline.model import Model, SlotTable

GREEDY = SamplingParams(temperature=0.0)
Guess = tuple[tuple[int, ...], float]
"""The tokens of a path below the root, and the log-probability of the last one."""


class DraftedRequest:
    """Opens a request and keeps the target's replica of its tree."""

    def __init__(
        self,
        speculator: Speculator,
        tokens: Sequence[int],
        *,
        key: int = 1,
        sampling: SamplingParams = GREEDY,
        depth: int = 6,
        nodes: int = 1000,
        output: int = 0,
        link: int = 0,
        **more: Any,
    ) -> None:
        self.key = key
        self.tokens = list(tokens)
        self.tree = TokenTree(len(tokens) - 1, tokens[-1])
        self._speculator = speculator
        speculator.open(Opening(key, tokens, output, sampling, depth, nodes, link=link, **more))

    def commit(self, tokens: Sequence[int], states: Tensor | None = None) -> None:
        commit = Commit(self.key, self.tree.position, tokens, len(self.tree.match(tokens)), states)
        self.tree.commit(tokens)
        self.tokens += tokens
        self._speculator.commit(commit)

    def limit(self, depth: int, nodes: int, least: float = 0.0) -> None:
        self._speculator.limit(Limit(self.key, depth, nodes, least))

    def graft(self, grown: Mapping[int, Growth]) -> list[Guess]:
        """Add this request's nodes of a round; return them."""
        known = self.tree.size
        if growth := grown.get(self.key):
            assert self.tree.graft(growth, 10_000) == len(growth), "every node is new and has its parent"
        return [self._guess(node) for node in self.tree.nodes()[known:]]

    def grow(self, rounds: int = 10_000) -> list[Guess]:
        """The new nodes of so many rounds, or of all until there is nothing to draft."""
        guesses: list[Guess] = []
        for _ in range(rounds):
            if not (grown := self._speculator.grow()) and not self._speculator.behind:
                break
            guesses += self.graft(grown)
        return guesses

    def guesses(self) -> dict[tuple[int, ...], float]:
        """All nodes of the tree."""
        return dict(map(self._guess, self.tree.nodes()))

    def path_log_probs(self) -> list[float]:
        """Of all nodes."""
        return [self.tree.path_log_probs[node] for node in self.tree.nodes()]

    def children(self) -> dict[int, float]:
        """The root's children, in the order in which they came, and their log-probabilities."""
        return {self.tree.tokens[node]: self.tree.log_prob(node) for node in self.tree.children(ROOT)}

    def leaves(self) -> list[tuple[list[int], float]]:
        """The tokens of each longest path, and its probability."""
        tree = self.tree
        ends = [node for node in tree.nodes() if node not in tree.parents]
        return [(tree.path_tokens(node), math.exp(tree.path_log_probs[node])) for node in ends]

    def guessed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the tree has one below the other."""
        return len(self.tree.match(tokens))

    def likeliest(self) -> list[int]:
        """The likeliest child of the root, its likeliest child, and so on."""
        path: list[int] = []
        node = ROOT
        while children := self.tree.children(node):
            node = max(children, key=self.tree.log_prob)
            path.append(self.tree.tokens[node])
        return path

    def _guess(self, node: int) -> Guess:
        return tuple(self.tree.path_tokens(node)), self.tree.log_prob(node)


def finished(speculator: Speculator, tokens: Sequence[int], **more: Any) -> DraftedRequest:
    """A request of which everything is drafted."""
    request = DraftedRequest(speculator, tokens, **more)
    request.grow()
    return request


def accepted(request: DraftedRequest, output: Sequence[int]) -> tuple[int, int]:
    """How many tokens of a known output were guessed, and in how many steps; the speculator always has its time."""
    steps, right, rest = 0, 0, output
    while rest:
        request.grow()
        guessed = request.guessed(rest)
        new, rest = rest[: guessed + 1], rest[guessed + 1 :]
        request.commit(new)
        steps, right = steps + 1, right + guessed
    return right, steps


def decoded(model: Model, tokens: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
    """The model's own continuation of a prompt, one token at a time."""
    slot_table, path = SlotTable(), list(tokens)
    history = History(sampling, tokens, [], model.vocabulary_size)
    for position in range(len(tokens) + count - 1):
        slot_table.slots.append(position + 1)
        logits = model.run([slot_table.row(path[position], position)], [0]).logits
        if position == len(path) - 1:
            path += draw(logits, [SamplingRow(sampling, position + 1, history)]).tolist()
            history.extend(path[-1:])
    return path[len(tokens) :]


def drawn_tokens(tree: TokenTree, rng: random.Random, vocabulary: int) -> list[int]:
    """Tokens that a target may draw: some way down the tree, then often one that was not drafted."""
    tokens: list[int] = []
    node = ROOT
    while (children := tree.children(node)) and rng.random() < 0.7:
        node = rng.choice(children)
        tokens.append(tree.tokens[node])
    return tokens if tokens and rng.random() < 0.4 else [*tokens, rng.randrange(vocabulary)]
