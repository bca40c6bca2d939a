"""Drafting with Medusa heads (Cai et al. 2024): head i guesses the token that is i + 1 places after the root.

The heads see one state, and neither the root nor each other's guesses. So one pass gives the laws of all places, and
every path of one token of each is a guess: its probability is the product of theirs. Medusa verifies a fixed choice of
such paths by the ranks of their tokens (`medusa_choices`), found by trying on a sample of text; here the likeliest
paths are taken, by what the heads themselves say at this place.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.sampling import History
from paceline.core.sampling import SamplingRow as DrawRow
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.draw_prediction import RankedTokens, predict_draws
from paceline.drafting.heads.medusa_heads import MedusaHeads
from paceline.drafting.speculator import Opening
from paceline.drafting.stateless_heads import MAX_ROWS, StatelessDraft, StatelessSpeculator
from paceline.model.target_weights import TargetWeights


@dataclass(slots=True, eq=False)
class MedusaDraft(StatelessDraft):
    """What the heads said about the state that it is at."""

    laws: Sequence[RankedTokens] = field(default_factory=list)
    """By head. Empty until the heads have run."""
    logits: Tensor | None = None
    """[heads, columns], where a rule makes a token's law depend on the path."""
    computed_at: int = -1
    """The root's position when the heads ran."""
    grown: bool = False
    """Whether all that is wanted is in the tree."""

    def restart(self) -> None:
        self.grown = False
        if self.computed_at != self.tree.position:
            self.laws, self.logits = [], None

    @property
    def can_grow(self) -> bool:
        """Whether there is something to do."""
        return not self.grown and self.root_state is not None and self.nodes_left > 0 and self.may_expand(ROOT)


class MedusaSpeculator(StatelessSpeculator[MedusaDraft]):
    """Method `medusa`."""

    method = "medusa"

    def __init__(
        self, heads: MedusaHeads, lent: TargetWeights, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """See `StatelessSpeculator`."""
        super().__init__(heads.model, lent, tree_width, least_path_probability)
        self._heads = heads

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> MedusaDraft:
        return MedusaDraft(opening, tree, history, floor, max_depth=len(self._heads))

    def draft_round(self) -> Iterator[tuple[MedusaDraft, list[int]]]:
        hungry = [draft for draft in self._drafts.values() if draft.can_grow]
        asking = [draft for draft in hungry if not draft.laws][: max(1, MAX_ROWS // len(self._heads))]
        if asking:
            self._run_heads(asking)
        self._ran = bool(asking)
        for draft in hungry:
            if draft.laws:
                draft.grown = True
                yield draft, self._likeliest(draft)

    def _run_heads(self, drafts: Sequence[MedusaDraft]) -> None:
        """Run the heads."""
        logits = self._heads(torch.stack([draft.state for draft in drafts if draft.state is not None]))
        rows = [row for draft in drafts for row in _rows(draft, len(self._heads))]
        told = iter(predict_draws(logits.flatten(0, 1), rows, self._width, self._heads.ids))
        for draft, each in zip(drafts, logits, strict=True):
            draft.laws = list(itertools.islice(told, len(self._heads)))
            draft.logits = each.clone() if draft.history.has_logits_rules else None
            draft.computed_at = draft.tree.position

    def _law(self, draft: MedusaDraft, node: int) -> RankedTokens:
        """What its head says about the place after this node; rules see the path to it."""
        head = draft.tree.depths[node]
        if draft.logits is None:
            return draft.laws[head]
        [law] = predict_draws(draft.logits[head : head + 1], [draft.draw_row(node)], self._width, self._heads.ids)
        return law

    def _likeliest(self, draft: MedusaDraft) -> list[int]:
        """The likeliest of all paths that the tree has no node for join it, as many as there is room for."""
        serial = itertools.count()  # breaks ties by age
        offers: list[tuple[float, int, int, int, float]] = []
        tree = draft.tree
        new: list[int] = []

        def offer(node: int) -> None:
            if draft.may_expand(node):
                known = [(tree.tokens[child], tree.log_prob(child)) for child in tree.children(node)]
                for token, log_prob in [*known, *draft.new_children(node, self._law(draft, node))]:
                    path_log_prob = tree.path_log_probs[node] + log_prob
                    heapq.heappush(offers, (-path_log_prob, next(serial), node, token, log_prob))

        offer(ROOT)
        while offers and draft.nodes_left:
            _, _, parent, token, log_prob = heapq.heappop(offers)
            child = tree.child(parent, token)
            if child is None:
                child = tree.add(parent, token, log_prob)
                new.append(child)
            offer(child)
        return new


def _rows(draft: MedusaDraft, heads: int) -> Iterator[DrawRow]:
    """The draws at all places that the heads guess, as far as they do not depend on the path."""
    first = draft.tree.position + 1
    return (DrawRow(draft.history.params, first + i, draft.history) for i in range(heads))
