"""Drafting with a small model of the target's family."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.best_first import BestFirstDraft, BestFirstSpeculator, DraftPass
from paceline.drafting.speculator import Opening
from paceline.model.model import Model


class DraftModelSpeculator(BestFirstSpeculator[BestFirstDraft]):
    """Method `draft_model`."""

    method = "draft_model"

    def __init__(
        self,
        model: Model,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """See `BestFirstSpeculator`."""
        width = min(tree_width, model.vocabulary_size)
        super().__init__(model.slots, width, cost, least_path_probability, clock)
        self.model = model.name
        self.vocabulary_fingerprint = model.fingerprint
        self.vocabulary_size = model.vocabulary_size
        self.position_limit = model.max_model_len
        self._model = model

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> BestFirstDraft:
        return BestFirstDraft(opening, list(opening.tokens), tree, history, self.position_limit, floor)

    def tree(self, request_id: int) -> TokenTree:
        """The guesses of an open request."""
        return self._drafts[request_id].tree

    def rewind(self, request_id: int, length: int) -> None:
        """Take back what was committed after the first `length` tokens of an open request, and all guesses.

        What was computed of those tokens is kept, but for the last, which is to be expanded again.
        """
        draft = self._drafts[request_id]
        self._free += [*draft.slots.values(), *draft.slot_table.slots[length:]]
        draft.slots.clear()
        draft.frontier.clear()
        draft.slot_table.truncate(length)
        del draft.tokens[length:]
        draft.computed = min(draft.computed, length - 1)
        draft.tree = TokenTree(length - 1, draft.tokens[-1])
        split = min(length, len(draft.opening.tokens) - draft.opening.output_tokens)
        draft.history = History(draft.history.params, draft.tokens[:split], draft.tokens[split:], self.vocabulary_size)

    def run(self, this: DraftPass[BestFirstDraft]) -> tuple[Tensor, Tensor | None]:
        return self._model.run(this.rows, this.wanted).logits, None
