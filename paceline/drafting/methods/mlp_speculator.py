"""Drafting with an MLP speculator: every draft token changes the state that predicts the next one.

A node is *expanded* by one step of the network: its parent's state and its own token give its state and the
distribution of its children. A round goes down level by level, with the most probable nodes of all requests together,
until it has computed `MAX_ROWS` rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.draw_prediction import MAX_ROWS, RankedTokens, predict_draws
from paceline.drafting.heads.mlp_network import MlpChainNetwork, is_mlp_speculator, load_mlp_speculator
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Opening, Speculator
from paceline.drafting.stateless_heads import StatelessRequest, StatelessSpeculator
from paceline.model.target_weights import TargetWeights

DraftNode = tuple["MlpRequest", int]


@dataclass(slots=True, eq=False)
class MlpRequest(StatelessRequest):
    """One request, and the states of the nodes that were expanded since the last commit."""

    vocabulary_limit: int = 0
    """Input tokens of the network are below this."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """By expanded node, the input of its children."""
    frontier: list[int] = field(default_factory=list)
    """Nodes that can be expanded next, most probable first."""

    def root_moved(self, committed: CommitResult) -> None:
        """Discard all states: they derive from an older state of the target."""
        self.states.clear()

    def refresh_frontier(self) -> None:
        nodes = (ROOT, *self.tree.nodes()) if self.root_state is not None else ()
        self.frontier = [
            node
            for node in nodes
            if node not in self.states
            and (node == ROOT or self.tree.parents[node] in self.states)
            and self.may_expand(node)
        ]
        self.frontier.sort(key=self.tree.path_log_probs.__getitem__, reverse=True)

    def may_expand(self, node: int) -> bool:
        return self.tree.tokens[node] < self.vocabulary_limit and StatelessRequest.may_expand(self, node)

    def expandable(self, width: int) -> Sequence[int]:
        """The start of the frontier: no more nodes than fill the tree if each gets `width` children."""
        return self.frontier[: -(-self.nodes_left // width)]

    def input_state(self, node: int) -> Tensor:
        """The state before this node: the target's for the root, else its parent's."""
        state = self.state if node == ROOT else self.states[self.tree.parents[node]]
        assert state is not None, "the frontier is empty until the root's state has arrived"
        return state

    def expand(self, node: int, state: Tensor, distribution: RankedTokens) -> list[int]:
        """Store the node's state and add its children; returns the new ones."""
        self.states[node] = state
        new = [self.tree.add(node, *child) for child in self.new_children(node, distribution)[: self.nodes_left]]
        self.refresh_frontier()
        return new


class MlpSpeculator(StatelessSpeculator[MlpRequest]):
    """Method `mlp_speculator`."""

    method = "mlp_speculator"

    def __init__(
        self, network: MlpChainNetwork, target: TargetWeights, tree_width: int, least_path_probability: float = 0.0
    ) -> None:
        """See `StatelessSpeculator`."""
        super().__init__(network.model, target, tree_width, least_path_probability)
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float) -> MlpRequest:
        network = self._network
        return MlpRequest(
            opening, tree, history, least_path_log_prob, network.steps, vocabulary_limit=network.vocabulary_limit
        )

    def draft_round(self) -> Iterator[tuple[MlpRequest, list[int]]]:
        left = MAX_ROWS
        while left and (level := list(itertools.islice(self._most_probable(), left))):
            left -= len(level)
            for step, nodes in itertools.groupby(sorted(level, key=_depth), key=_depth):
                yield from self._expand(step, list(nodes))
        self._computed = left < MAX_ROWS

    def _most_probable(self) -> Iterator[DraftNode]:
        """Expandable nodes of all requests, most probable first."""
        nodes = (zip(itertools.repeat(request), request.expandable(self._width)) for request in self._requests.values())
        return heapq.merge(*nodes, key=lambda pair: -pair[0].tree.path_log_probs[pair[1]])

    def _expand(self, step: int, nodes: Sequence[DraftNode]) -> Iterator[tuple[MlpRequest, list[int]]]:
        """One step of the network over nodes of one depth."""
        inputs = torch.stack([request.input_state(node) for request, node in nodes])
        tokens = torch.tensor([request.tree.tokens[node] for request, node in nodes], device=inputs.device)
        logits, states = self._network.step(step, self._network.begin(inputs) if step == 0 else inputs, tokens)
        rows = [request.draw_row(node) for request, node in nodes]
        distributions = predict_draws(logits, rows, self._width, self._network.ids)
        for (request, node), state, distribution in zip(nodes, states, distributions, strict=True):
            yield request, request.expand(node, state, distribution)


def _depth(pair: DraftNode) -> int:
    request, node = pair
    return request.tree.depths[node]


matches = is_mlp_speculator


def build(inputs: MethodInputs) -> Speculator:
    network, config = load_mlp_speculator(inputs.checkpoint, inputs.target), inputs.config
    return MlpSpeculator(network, inputs.target, config.tree_width, config.least_path_probability)
