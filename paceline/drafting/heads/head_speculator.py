"""Drafting with a head that reads the target's hidden states: EAGLE-1, -2, -3 and multi-token prediction.

A head has one row for every token but a request's first. The feature of a draft token is the head's own approximation
of the target's state. When the target commits draft tokens, their states come with the commit, so their rows are
computed again from these. The nodes below them stay in the tree and are expanded again.

A row may have to wait for its state, which comes with the target's prefill, with a commit, or much later, after a hit
in the target's prefix cache or a move of the request to this draft worker. The head drafts once all states have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.policy.step_cost import RowCost
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.best_first import BestFirstRequest, BestFirstSpeculator, DraftPass
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.heads.head_network import HeadNetwork, head_facts
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Opening, Speculator
from paceline.model.kept_row_cost import kept_row_cost, weight_bytes
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


@dataclass(slots=True, eq=False)
class HeadRequest(BestFirstRequest):
    """One request; its tokens are all but the first."""

    features: dict[int, Tensor] = field(default_factory=dict)
    """[h] of each expanded node, including the root."""

    @property
    def computable(self) -> int:
        return min(self.wanted, len(self.states))

    def root_moved(self, committed: CommitResult) -> list[int]:
        """Free every slot of a draft token: committed tokens are computed again from the target's states."""
        slots = list(self.slots.values())
        self.slots.clear()
        self.features.clear()
        return slots

    def refresh_frontier(self) -> None:
        """The frontier is empty until the root is expanded: without the root's feature no child has an input."""
        if ROOT in self.features:
            BestFirstRequest.refresh_frontier(self)
        else:
            self.frontier.clear()


class HeadSpeculator(BestFirstSpeculator[HeadRequest]):
    """Methods `eagle`, `eagle3` and `mtp`, by their networks."""

    def __init__(
        self,
        method: str,
        network: HeadNetwork,
        fingerprint: str,
        vocabulary_size: int,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fingerprint` and `vocabulary_size`: the target's. The other parameters: see `BestFirstSpeculator`."""
        facts = head_facts(network, fingerprint, vocabulary_size)
        super().__init__(facts, tree_width, cost, least_path_probability, clock)
        self.method = method
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float) -> HeadRequest:
        return HeadRequest(opening, tree, history, least_path_log_prob, list(opening.tokens[1:]), self.position_limit)

    @torch.inference_mode()
    def run(self, this: DraftPass[HeadRequest]) -> tuple[Tensor, Tensor | None]:
        output = self._network.run(this.rows, self._features(this), this.wanted)
        for (request, node), feature in zip(this.expanded, output.features, strict=True):
            request.features[node] = feature
        return output.logits, self._network.ids

    def _features(self, this: DraftPass[HeadRequest]) -> Tensor:
        """[rows, h]: of committed tokens first, then of draft tokens, which is the order of the pass."""
        states = [state for request, node in this.owners if node is None for state in request.states.take(1)]
        parents = [request.features[request.tree.parents[node]] for request, node in this.owners if node is not None]
        parts = [self._network.encode(torch.stack(states))] if states else []
        parts += [torch.stack(parents)] if parents else []
        return torch.cat(parts)


def build_head_speculator(inputs: MethodInputs, network: HeadNetwork) -> Speculator:
    """The speculator of a head that drafts one token after another, with its measured cost per row."""
    config, target = inputs.config, inputs.target
    facts = (config.method, target.dtype, target.hidden_size, target.vocabulary_size)
    weights = weight_bytes(inputs.checkpoint.folder)
    probe, engine = _HeadProbe(network, target), inputs.engine
    cost = kept_row_cost(probe, MAX_ROWS, engine.threads, (*facts, weights, engine.quantization), target.device)
    return HeadSpeculator(
        config.method,
        network,
        target.fingerprint,
        target.vocabulary_size,
        config.tree_width,
        cost,
        config.least_path_probability,
    )


class _HeadProbe:
    """Runs a head over one zero state, to measure its passes."""

    def __init__(self, network: HeadNetwork, target: TargetWeights) -> None:
        self.slots, self.max_model_len = network.slots, network.position_limit
        self._network = network
        layers = len(network.hidden_state_layers)
        states = torch.zeros(1, layers, target.hidden_size, dtype=target.dtype, device=target.device)
        self._feature = network.encode(states)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> object:
        return self._network.run(rows, self._feature.expand(len(rows), -1), wanted)
