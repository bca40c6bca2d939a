"""Drafting several tokens in one pass: PARD, P-EAGLE and DFlash.

Once after each commit the network is run over the root, and over places behind it that stand for tokens nobody knows
yet. It gives one law for each of the next positions, whatever the guesses between are, and the tree is their product
(`paceline.drafting.product_tree`), with the target's noise in each of them. Guesses that a commit leaves standing
stay, beside those that the new laws make.

What is computed for the unknown places is never kept: the tokens that come to stand there were not known.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.core.growth import Growth
from paceline.core.tree import CommitResult
from paceline.drafting import product_tree
from paceline.drafting.cached_draft import CachedDraft, CachedSpeculator, round_robin
from paceline.drafting.draw_prediction import RankedTokens, predict_draws
from paceline.drafting.product_tree import draw_rows
from paceline.model.rows import Row

MAX_ROWS = 256
"""Rows of guesses in one round."""


@dataclass(slots=True, eq=False)
class ParallelDraft(CachedDraft):
    """Tokens before the root are computed as they become known, the root when guesses are wanted."""

    distributions: Sequence[RankedTokens] | None = None
    """Of the tokens after the root; None: there was no pass for this root yet."""
    may_grow: bool = False
    """Whether there may be more to guess by these laws."""

    @property
    def computable(self) -> int:
        return max(0, self.missing - 1)

    @property
    def context_computed(self) -> bool:
        """Whether all is there that the root's pass needs."""
        return self.missing == 1

    @property
    def depth(self) -> int:
        """How far below the root guesses may stand."""
        return max(0, min(self.opening.max_depth, self.limit - 1 - self.tree.position))

    @property
    def wants_pass(self) -> bool:
        """Whether the root's pass is wanted, and can be made."""
        return self.distributions is None and self.context_computed and self.depth > 0 and self.nodes_left > 0

    def root_moved(self, committed: CommitResult) -> list[int]:
        """Nothing is kept, and the laws were another root's."""
        self.distributions = None
        return []

    def refresh_frontier(self) -> None:
        self.may_grow = True

    def add_tokens(self) -> list[int]:
        """New nodes by the laws there are."""
        self.may_grow = False
        return product_tree.grow_product_tree(
            self.tree, (self.distributions or ())[: self.depth], self.nodes_left, self.floor
        )


@dataclass(slots=True, eq=False)
class HiddenStateDraft(ParallelDraft):
    """The target's hidden states of a position are needed before what builds on them can be computed."""

    @property
    def computable(self) -> int:
        return min(max(0, self.missing - 1), len(self.states))

    @property
    def context_computed(self) -> bool:
        return self.missing == 1 and self.states.known >= self.tree.position


D = TypeVar("D", bound=ParallelDraft)
ContextSpans = Sequence[tuple[D, range]]
"""Which committed tokens of which requests are to be computed."""
RequestedPasses = Sequence[tuple[D, int]]
"""Requests whose root's pass is to be made, and how many laws each wants."""


class ParallelSpeculator(CachedSpeculator[D]):
    """What all methods share that guess in one pass; a subclass says what it computes."""

    def __init__(
        self, slots: int, ahead: int, tree_width: int, least_path_probability: float = 0.02, spare: int = 0
    ) -> None:
        """`slots`: positions for which there is room. `ahead`: most laws of one pass. `tree_width`: most tokens of
        each. `spare`: free slots that a request's pass needs for its duration."""
        super().__init__(slots, least_path_probability)
        self._tokens_per_pass, self._width, self._scratch_slots = ahead, tree_width, spare

    @abstractmethod
    def run_pass(self, context: ContextSpans[D], asked: RequestedPasses[D]) -> tuple[Tensor, Tensor | None]:
        """One pass: the wanted laws' logits, request by request [laws, columns], and the token of each column; None:
        column n is token n."""

    @torch.inference_mode()
    def grow(self) -> dict[int, Growth]:
        """One pass: missing context, and the roots whose context is complete with it."""
        owned = self._by_link()
        context = list(self._context(owned))
        asked = self._asked(owned)
        self._computed = bool(context or asked)
        if self._computed:
            self._set_distributions(asked, *self.run_pass(context, asked))
        new = {
            key: draft.add_tokens()
            for key, draft in self._drafts.items()
            if draft.may_grow and draft.distributions is not None
        }
        return {key: self._drafts[key].tree.growth(nodes) for key, nodes in new.items() if nodes}

    def _asked(self, owned: Sequence[Sequence[D]]) -> RequestedPasses[D]:
        most = max(1, MAX_ROWS // self._tokens_per_pass)
        if self._scratch_slots:
            most = min(most, len(self._free) // self._scratch_slots)
        hands = [iter([draft for draft in drafts if draft.wants_pass]) for drafts in owned]
        asked = [
            (draft, min(draft.depth, self._tokens_per_pass)) for draft in itertools.islice(round_robin(hands), most)
        ]
        self._next_link += len(asked)
        return asked

    def _set_distributions(self, asked: RequestedPasses[D], logits: Tensor, ids: Tensor | None) -> None:
        """Every request its laws."""
        if not asked:
            return
        rows = [row for draft, count in asked for row in draw_rows(draft.history, draft.tree.position + 1, count)]
        laws = iter(predict_draws(logits, rows, self._width, ids))
        for draft, count in asked:
            draft.distributions = list(itertools.islice(laws, count))
            draft.refresh_frontier()


class MaskTokenSpeculator(ParallelSpeculator[D]):
    """The unknown places are rows of a mask token, each of which sees the ones before it."""

    def __init__(
        self, slots: int, mask_token: int, ahead: int, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """The root's row gives the first law, so there is one mask less than laws. The rest as in
        `ParallelSpeculator`."""
        super().__init__(slots, ahead, tree_width, least_path_probability, ahead - 1)
        self._mask_token = mask_token

    def rows(self, context: ContextSpans[D], asked: RequestedPasses[D]) -> tuple[list[Row], list[int]]:
        """The rows of one pass: context, then for each request its root and masks. And which of them give laws.

        The roots count as computed from then on.
        """
        rows = [draft.slot_table.row(draft.tokens[i], i) for draft, span in context for i in span]
        wanted = range(len(rows), len(rows) + sum(count for _, count in asked))
        free = reversed(self._free)  # nobody takes any during the pass
        for draft, count in asked:
            rows.append(draft.slot_table.row(draft.tokens[-1], draft.computed))
            draft.computed += 1
            masks: list[int] = []
            for slot in itertools.islice(free, count - 1):
                masks.append(slot)
                rows.append(draft.slot_table.branch_row(self._mask_token, masks))
        return rows, list(wanted)
