"""Drafting from a single hidden state, by heads without a KV cache.

The heads' input is the target's final state at the position before the root: the state that the root was drawn from. It
arrives during the target's prefill, with a commit, or later, when the target finds a prefix in its cache or moves a
request to this draft worker. Until it is there, nothing is drafted. States of earlier positions are not used.

A node that survives a commit stays in the tree, but its children came from an older state. So the tree grows anew
after every commit, and only nodes that are not in it yet are sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.core.growth import Growth
from paceline.core.tree import CommitResult
from paceline.drafting.draw_prediction import NetworkFacts, PredictedRequest, PredictingSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, new_hidden_states
from paceline.model.target_weights import TargetWeights

D = TypeVar("D", bound="StatelessRequest")


@dataclass(slots=True, eq=False)
class StatelessRequest(PredictedRequest):
    """A request and the target's latest hidden state."""

    max_depth: int
    """The deepest node that the heads can draft."""
    known_states: int = 0
    """Positions whose states have arrived."""
    state: Tensor | None = None
    """[H] of the last of these positions."""

    @property
    def root_state(self) -> Tensor | None:
        """The state that the root was drawn from; None if it has not arrived."""
        return self.state if self.known_states == self.tree.position else None

    def add_states(self, position: int, states: Tensor, like: TargetWeights) -> None:
        """Keep the last of the states [positions, 1, H] from `position` on. Raises `DraftError`."""
        if states.shape[1:] != (1, like.hidden_size):
            raise DraftError(f"hidden states of shape {list(states.shape)}, not [positions, 1, {like.hidden_size}]")
        new = new_hidden_states(self.known_states, position, states)
        if len(new):
            self.known_states += len(new)
            self.state = new[-1, 0].to(like.device, like.dtype, copy=True)  # a view would keep all states alive

    def may_expand(self, node: int) -> bool:
        """Whether children of this node are wanted."""
        deepest = min(self.opening.max_depth, self.max_depth)
        return self.tree.path_log_probs[node] > self.least_path_log_prob and self.tree.depths[node] < deepest

    def root_moved(self, committed: CommitResult) -> None:
        """Follow a commit to the tree; `refresh_frontier` comes next."""


class StatelessSpeculator(PredictingSpeculator[D], Generic[D]):
    """Keeps the latest state of each request. A subclass drafts from it."""

    def __init__(self, model: str, target: TargetWeights, tree_width: int, least_path_probability: float = 0.0) -> None:
        """`model`: the heads' name. The rest: see `PredictingSpeculator`."""
        size = target.vocabulary_size
        facts = NetworkFacts(model, target.fingerprint, size, size, hidden_state_layers=(target.final_layer,))
        super().__init__(facts, tree_width, least_path_probability)
        self._target = target

    @abstractmethod
    def draft_round(self) -> Iterator[tuple[D, list[int]]]:
        """Draft one round: requests and the new nodes in their trees. Sets `_computed`."""

    def context(self, context: Context) -> None:
        if request := self._requests.get(context.request_id):
            request.add_states(context.base_position, context.hidden_states, self._target)
            request.refresh_frontier()

    def advance(self, request: D, commit: Commit) -> None:
        request.root_moved(request.tree.commit(commit.tokens))
        request.history.extend(commit.tokens)
        if commit.hidden_states is not None:
            request.add_states(commit.base_position, commit.hidden_states, self._target)
        request.refresh_frontier()

    @torch.inference_mode()
    def grow(self) -> dict[int, Growth]:
        new: dict[int, list[int]] = {}
        for request, nodes in self.draft_round():
            new.setdefault(request.opening.request_id, []).extend(nodes)
        return self._growths(new)
