"""Growing trees from a single hidden state: what the methods share that keep no keys and values.

All that such a method is fed with is what the target's final norm gave at the position before the root: the state that
the root itself was drawn from. It comes with the target's prefill, with a commit, or long after, when the target finds
a prefix in its cache or moves a request here; states of earlier positions are passed over. Until it has come nothing is
guessed.

A guess that survives a commit stays in the tree, but what follows it was guessed from a state that is old now. So after
every commit the tree is grown again from the new state, and only the nodes that are not there yet are sent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.core.growth import Growth
from paceline.core.sampling import History
from paceline.core.sampling import SamplingRow as DrawRow
from paceline.core.tree import CommitResult, TokenTree
from paceline.drafting.draw_prediction import RankedTokens, request_history
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator, new_hidden_states
from paceline.model.target_weights import TargetWeights

MAX_ROWS = 256
"""Rows of logits computed in one round."""

D = TypeVar("D", bound="StatelessDraft")


@dataclass(slots=True, eq=False)
class StatelessDraft:
    """One request: its replica of the tree, and the latest of the target's hidden states."""

    opening: Opening
    tree: TokenTree
    history: History
    floor: float
    """Log-probability of a path, above which guesses are made."""
    max_depth: int
    """Deepest node that the method can guess."""
    known_states: int = 0
    """Positions of which the target's states have come."""
    state: Tensor | None = None
    """[H] of the last of them."""

    @property
    def root_state(self) -> Tensor | None:
        """The state that the root was drawn from, once it has come."""
        return self.state if self.known_states == self.tree.position else None

    @property
    def nodes_left(self) -> int:
        """How many more nodes are wanted."""
        return max(0, self.opening.max_nodes - self.tree.size)

    def add_states(self, position: int, states: Tensor, like: TargetWeights) -> None:
        """States [positions, 1, H] from `position` on, of which only the last is kept. Raises `DraftError`."""
        if states.shape[1:] != (1, like.hidden_size):
            raise DraftError(f"hidden states of shape {list(states.shape)}, not [positions, 1, {like.hidden_size}]")
        new = new_hidden_states(self.known_states, position, states)
        if len(new):
            self.known_states += len(new)
            self.state = new[-1, 0].to(like.device, like.dtype, copy=True)  # or else all of them would stay

    def may_expand(self, node: int) -> bool:
        """Whether children of this node are wanted."""
        deepest = min(self.opening.max_depth, self.max_depth)
        return self.tree.path_log_probs[node] > self.floor and self.tree.depths[node] < deepest

    def new_children(self, node: int, law: RankedTokens) -> RankedTokens:
        """Those of the guesses after this node that are likely enough, and not in the tree yet."""
        return [
            (token, log_prob)
            for token, log_prob in law
            if self.tree.path_log_probs[node] + log_prob > self.floor and self.tree.child(node, token) is None
        ]

    def draw_row(self, node: int) -> DrawRow:
        """The draw after `node` that the target will make."""
        position = self.tree.position + self.tree.depths[node] + 1
        return DrawRow(self.history.params, position, self.history, self.tree.path_tokens(node))

    def root_moved(self, committed: CommitResult) -> None:
        """The tree has another root; `restart` follows."""

    @abstractmethod
    def restart(self) -> None:
        """The root, its state or the limits are others now: what was computed may not hold, or not be enough."""


class StatelessSpeculator(Speculator, Generic[D]):
    """A subclass says which nodes the states make it guess."""

    def __init__(self, model: str, lent: TargetWeights, tree_width: int, least_path_probability: float = 0.02) -> None:
        """`model`: its name. `tree_width`: most children per node. Guesses whose path is not likelier than
        `least_path_probability` are not made; with 0 none is too unlikely."""
        self.model = model
        self.vocabulary_fingerprint = lent.fingerprint
        self.vocabulary_size = lent.vocabulary_size
        self.hidden_state_layers = (lent.final_layer,)
        self._lent = lent
        self._width = tree_width
        self._min_path_probability = least_path_probability
        self._drafts: dict[int, D] = {}
        self._ran = False
        """Whether the last round computed anything; if not, there was nothing to compute."""

    @abstractmethod
    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> D:
        """A draft of this request, which has heard nothing."""

    @abstractmethod
    def draft_round(self) -> Iterator[tuple[D, list[int]]]:
        """One round: requests and nodes that are new in their trees. It sets `_ran`."""

    @property
    def behind(self) -> bool:
        return self._ran

    def open(self, opening: Opening) -> None:
        history = request_history(opening, self.vocabulary_size, self.grammars)
        tree = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        floor = self._floor(opening.least_path_probability)
        self._drafts[opening.request_id] = self.begin(opening, tree, history, floor)

    def context(self, context: Context) -> None:
        if draft := self._drafts.get(context.request_id):
            draft.add_states(context.base_position, context.hidden_states, self._lent)
            draft.restart()

    def commit(self, commit: Commit) -> None:
        draft = self._drafts.get(commit.request_id)
        if draft is None:
            return
        if draft.tree.position != commit.base_position:
            raise DraftError(f"the root is at {draft.tree.position}, the commit at {commit.base_position}")
        draft.root_moved(draft.tree.commit(commit.tokens))
        draft.history.extend(commit.tokens)
        if commit.hidden_states is not None:
            draft.add_states(commit.base_position, commit.hidden_states, self._lent)
        draft.restart()

    def limit(self, limit: Limit) -> None:
        draft = self._drafts.get(limit.request_id)
        if draft is not None:
            draft.opening = replace(
                draft.opening,
                max_depth=limit.max_depth,
                max_nodes=limit.max_nodes,
                least_path_probability=limit.least_path_probability,
            )
            draft.floor = self._floor(limit.least_path_probability)
            draft.restart()

    def close(self, request_id: int) -> None:
        self._drafts.pop(request_id, None)

    @torch.inference_mode()
    def grow(self) -> dict[int, Growth]:
        new: dict[int, list[int]] = {}
        for draft, nodes in self.draft_round():
            new.setdefault(draft.opening.request_id, []).extend(nodes)
        return {key: self._drafts[key].tree.growth(nodes) for key, nodes in new.items() if nodes}

    def _floor(self, wanted: float) -> float:
        least = max(wanted, self._min_path_probability)
        return math.log(least) if least else -math.inf
