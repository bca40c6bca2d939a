"""Drafting with a head that is fed with the target's hidden states: EAGLE-1, -2, -3 and multi-token prediction.

A head has a row for every token but the first, which nothing stands before. Rows of guesses are fed with what the head
itself made of the guess before, and are worse for it. So what they computed is forgotten when the target commits them:
with the commit come the states that the rows should have had. The guesses themselves stay in the tree, and are expanded
again under the better context.

A row can wait: its state comes with the target's prefill, with a commit, or long after, when the target finds a prefix
in its cache or moves a request here. Until all have come nothing is guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import History
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.best_first import BestFirstDraft, BestFirstSpeculator, DraftPass
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.speculator import Opening


@dataclass(slots=True, eq=False)
class HeadDraft(BestFirstDraft):
    """Its tokens are all but the request's first."""

    features: dict[int, Tensor] = field(default_factory=dict)
    """[h] of expanded nodes, the root among them."""

    @property
    def computable(self) -> int:
        return min(self.wanted, len(self.states))

    def root_moved(self, committed: CommitResult) -> list[int]:
        """Nothing is kept: the target's states of these tokens are better than what was computed."""
        slots = list(self.slots.values())
        self.slots.clear()
        self.features.clear()
        return slots

    def refresh_frontier(self) -> None:
        """Until the root is expanded, there is nothing to feed its children with."""
        if ROOT in self.features:
            BestFirstDraft.refresh_frontier(self)
        else:
            self.frontier.clear()


class HeadSpeculator(BestFirstSpeculator[HeadDraft]):
    """Methods `eagle`, `eagle3` and `mtp`, by their networks."""

    def __init__(
        self,
        method: str,
        network: HeadNetwork,
        fingerprint: str,
        vocabulary_size: int,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fingerprint` and `vocabulary_size` are the target's. The rest as in `BestFirstSpeculator`."""
        columns = vocabulary_size if network.ids is None else len(network.ids)
        super().__init__(network.slots, min(tree_width, columns), cost, least_path_probability, clock)
        self.method = method
        self.model = network.model
        self.vocabulary_fingerprint = fingerprint
        self.vocabulary_size = vocabulary_size
        self.hidden_state_layers = tuple(network.hidden_state_layers)
        self.position_limit = network.position_limit
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> HeadDraft:
        return HeadDraft(opening, list(opening.tokens[1:]), tree, history, self.position_limit, floor)

    @torch.inference_mode()
    def run(self, this: DraftPass[HeadDraft]) -> tuple[Tensor, Tensor | None]:
        output = self._network.run(this.rows, self._features(this), this.wanted)
        for (draft, node), feature in zip(this.expanded, output.features, strict=True):
            draft.features[node] = feature
        return output.logits, self._network.ids

    def _features(self, this: DraftPass[HeadDraft]) -> Tensor:
        """[rows, h]: those of committed tokens come before those of guesses."""
        told = [state for draft, node in this.owners if node is None for state in draft.states.take(1)]
        guessed = [draft.features[draft.tree.parents[node]] for draft, node in this.owners if node is not None]
        parts = [self._network.encode(torch.stack(told))] if told else []
        parts += [torch.stack(guessed)] if guessed else []
        return torch.cat(parts)
