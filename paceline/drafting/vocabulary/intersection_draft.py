"""Drafting with a model of another vocabulary than the target's, among the tokens that both have (TLI).

The draft is run over its own tokens, and guesses the target's: its logits are cut down to the tokens that the target
has, too, and go by the target's ids from there on. So they meet the very noise with which the target will draw. What
the target commits is written in the draft's tokens, one or several for each; hence positions differ, and what is drawn
goes by the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.best_first import BestFirstDraft, BestFirstSpeculator, DraftPass
from paceline.drafting.speculator import Opening
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model.model import Model


@dataclass(slots=True, eq=False, kw_only=True)
class TranslatedDraft(BestFirstDraft):
    """Its tokens are the draft model's, those of the tree the target's. `limit` counts the former."""

    mapping: VocabularyMapping

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        return self.mapping.to_draft_tokens(tokens)

    @property
    def depth_limit(self) -> int:
        return min(self.opening.max_depth, self.limit - len(self.tokens))


class IntersectionDraft(BestFirstSpeculator[TranslatedDraft]):
    """Method `draft_model` with `vocabulary_mapping` `intersection`."""

    method = "draft_model"

    def __init__(
        self,
        model: Model,
        mapping: VocabularyMapping,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """See `BestFirstSpeculator`. Raises ValueError if the vocabularies have too little in common."""
        mapping.require_common()
        common = mapping.common
        super().__init__(model.slots, min(tree_width, len(common)), cost, least_path_probability, clock)
        self.model = model.name
        self.vocabulary_fingerprint = mapping.target.tokenizer.fingerprint
        self.vocabulary_size = mapping.target.size
        self.position_limit = model.max_model_len
        self._model = model
        self._mapping = mapping
        self._columns = torch.tensor(common)
        self._ids = torch.tensor([mapping.target_ids[id_] for id_ in common])

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> TranslatedDraft:
        tokens = self._mapping.prompt_to_draft_tokens(opening.tokens)
        return TranslatedDraft(opening, tokens, tree, history, self.position_limit, floor, mapping=self._mapping)

    def run(self, this: DraftPass[TranslatedDraft]) -> tuple[Tensor, Tensor | None]:
        logits = self._model.run(this.rows, this.wanted).logits
        if self._columns.device != logits.device:  # once: from here on they are where the logits are
            self._columns, self._ids = self._columns.to(logits.device), self._ids.to(logits.device)
        return logits.index_select(-1, self._columns), self._ids
