"""Drafting with Medusa heads (Cai et al. 2024): head i predicts the token i + 1 positions after the root.

All heads read one hidden state, and neither the root nor each other's draft tokens. So one pass gives the distributions
of all depths, and the probability of a path is the product of its tokens' probabilities. Medusa verifies a fixed set of
paths by the ranks of their tokens (`medusa_choices`), which was searched on sample text; here the tree gets the most
probable paths of the current distributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.draw_prediction import MAX_ROWS, RankedTokens, predict_draws
from paceline.drafting.heads.medusa_heads import MedusaHeads, is_medusa, load_medusa
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.product_tree import draw_rows, grow_product_tree
from paceline.drafting.speculator import Opening, Speculator
from paceline.drafting.stateless_heads import StatelessRequest, StatelessSpeculator
from paceline.model.target_weights import TargetWeights


@dataclass(slots=True, eq=False)
class MedusaRequest(StatelessRequest):
    """One request, and the heads' output for its root."""

    distributions: Sequence[RankedTokens] = field(default_factory=list)
    """By head; empty until the heads have run."""
    logits: Tensor | None = None
    """[heads, columns]; kept only if the request has rules that depend on the path."""
    complete: bool = False
    """The tree has every wanted node."""

    def root_moved(self, committed: CommitResult) -> None:
        """Discard the heads' output: it was computed from an older state."""
        self.distributions, self.logits = [], None

    def refresh_frontier(self) -> None:
        self.complete = False

    @property
    def can_grow(self) -> bool:
        return not self.complete and self.root_state is not None and self.nodes_left > 0 and self.may_expand(ROOT)


class MedusaSpeculator(StatelessSpeculator[MedusaRequest]):
    """Method `medusa`."""

    method = "medusa"

    def __init__(
        self, heads: MedusaHeads, target: TargetWeights, tree_width: int, least_path_probability: float = 0.0
    ) -> None:
        """See `StatelessSpeculator`."""
        super().__init__(heads.model, target, tree_width, least_path_probability)
        self._heads = heads

    def begin(self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float) -> MedusaRequest:
        return MedusaRequest(opening, tree, history, least_path_log_prob, max_depth=len(self._heads))

    def draft_round(self) -> Iterator[tuple[MedusaRequest, list[int]]]:
        requests = [request for request in self._requests.values() if request.can_grow]
        without_output = [request for request in requests if not request.distributions][
            : max(1, MAX_ROWS // len(self._heads))
        ]
        if without_output:
            self._run_heads(without_output)
        self._computed = bool(without_output)
        for request in requests:
            if request.distributions:
                request.complete = True
                yield request, self._add_paths(request)

    def _run_heads(self, requests: Sequence[MedusaRequest]) -> None:
        logits = self._heads(torch.stack([request.state for request in requests if request.state is not None]))
        count = len(self._heads)
        rows = [row for request in requests for row in draw_rows(request.history, request.tree.position + 1, count)]
        distributions = iter(predict_draws(logits.flatten(0, 1), rows, self._width, self._heads.ids))
        for request, own_logits in zip(requests, logits, strict=True):
            request.distributions = list(itertools.islice(distributions, count))
            request.logits = own_logits.clone() if request.history.has_logits_rules else None

    def _add_paths(self, request: MedusaRequest) -> list[int]:
        """Add the most probable missing nodes, as many as are wanted; return them."""
        distributions = request.distributions[: request.opening.max_depth]
        after = None if request.logits is None else partial(self._distribution, request, request.logits)
        return grow_product_tree(request.tree, distributions, request.nodes_left, request.least_path_log_prob, after)

    def _distribution(self, request: MedusaRequest, logits: Tensor, node: int) -> RankedTokens:
        """Of the token after this node. Rules see the path to it."""
        head = request.tree.depths[node]
        rows = [request.draw_row(node)]
        [distribution] = predict_draws(logits[head : head + 1], rows, self._width, self._heads.ids)
        return distribution


matches = is_medusa


def build(inputs: MethodInputs) -> Speculator:
    heads, config = load_medusa(inputs.checkpoint, inputs.target), inputs.config
    return MedusaSpeculator(heads, inputs.target, config.tree_width, config.least_path_probability)
