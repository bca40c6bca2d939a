"""Drafting with an MLP speculator: every draft token changes the state that predicts the next one.

A node is *expanded* by one step of the network: its parent's state and its own token give its state and the
distribution of its children. A round goes down level by level, with the most probable nodes of all requests together,
until it has computed `MAX_ROWS` rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.tree import ROOT, CommitResult
from paceline.drafting.draw_prediction import MAX_ROWS, predict_draws
from paceline.drafting.heads.mlp_network import MlpChainNetwork, is_mlp_speculator, load_mlp_speculator
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import DraftCache, NetworkRequest, NetworkSpeculator, tree_width
from paceline.drafting.speculator import DraftingLimits, Speculator


@dataclass(slots=True, eq=False)
class LevelRequest(NetworkRequest):
    """One request, and the states of the nodes that were expanded since the last commit."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    """By expanded node, the input of its children."""
    frontier: list[int] | None = None
    """Nodes that can be expanded next, most probable first; None: not known."""

    @property
    def wanted(self) -> int:
        return 0

    def root_moved(self, committed: CommitResult) -> list[int]:
        """Discard all states: they derive from an older state of the target."""
        self.inputs.clear()
        return []

    def refresh(self) -> None:
        self.frontier = None


DraftNode = tuple[LevelRequest, int]


class Levels:
    """Expands the most probable nodes, level by level."""

    request_type = LevelRequest

    def __init__(self, network: MlpChainNetwork, limits: DraftingLimits) -> None:
        self.network, self.limits = network, limits
        self.computed = False
        self._width = tree_width(network, limits)

    def grow(self, pool: DraftCache[LevelRequest]) -> Mapping[int, list[int]]:
        new: dict[int, list[int]] = {}
        left = MAX_ROWS
        while left and (level := list(itertools.islice(self._most_probable(pool.requests.values()), left))):
            left -= len(level)
            for step, nodes in itertools.groupby(sorted(level, key=_depth), key=_depth):
                for request, children in self._expand(step, list(nodes)):
                    new.setdefault(request.opening.request_id, []).extend(children)
        self.computed = left < MAX_ROWS
        return new

    def _most_probable(self, requests: Iterable[LevelRequest]) -> Iterator[DraftNode]:
        """Expandable nodes of all requests, most probable first: of each no more than fill its tree."""
        nodes = [
            zip(itertools.repeat(request), self._frontier(request)[: -(-request.nodes_left // self._width)])
            for request in requests
        ]
        return heapq.merge(*nodes, key=lambda pair: -pair[0].tree.path_log_probs[pair[1]])

    def _frontier(self, request: LevelRequest) -> Sequence[int]:
        if request.frontier is None:
            tree, inputs = request.tree, request.inputs
            assert request.states is not None
            nodes = (ROOT, *tree.nodes()) if request.states.complete(tree.position) else ()
            request.frontier = [
                node
                for node in nodes
                if node not in inputs
                and (node == ROOT or tree.parents[node] in inputs)
                and self._may_expand(request, node)
            ]
            request.frontier.sort(key=tree.path_log_probs.__getitem__, reverse=True)
        return request.frontier

    def _may_expand(self, request: LevelRequest, node: int) -> bool:
        """Whether children of this node are wanted, and its token is one of the network's."""
        tree, deepest = request.tree, min(request.depth_limit, self.network.steps)
        wanted = tree.path_log_probs[node] > request.least_path_log_prob and tree.depths[node] < deepest
        return wanted and tree.tokens[node] < self.network.vocabulary_limit

    def _expand(self, step: int, nodes: Sequence[DraftNode]) -> Iterator[tuple[LevelRequest, list[int]]]:
        """One step of the network over nodes of one depth: their requests and new children."""
        network = self.network
        if step == 0:
            inputs = network.begin(network.root_states(request for request, _ in nodes))
        else:
            inputs = torch.stack([request.inputs[request.tree.parents[node]] for request, node in nodes])
        tokens = torch.tensor([request.tree.tokens[node] for request, node in nodes], device=inputs.device)
        logits, states = network.step(step, inputs, tokens)
        rows = [request.draw_row(node) for request, node in nodes]
        distributions = predict_draws(logits, rows, self._width, network.ids)
        for (request, node), state, distribution in zip(nodes, states, distributions, strict=True):
            request.inputs[node] = state
            children = request.new_children(node, distribution)[: request.nodes_left]
            request.refresh()
            yield request, [request.tree.add(node, *child) for child in children]


def _depth(pair: DraftNode) -> int:
    request, node = pair
    return request.tree.depths[node]


matches = is_mlp_speculator


def build(inputs: MethodInputs) -> Speculator:
    return NetworkSpeculator(Levels(load_mlp_speculator(inputs.checkpoint, inputs.target), inputs.limits))
