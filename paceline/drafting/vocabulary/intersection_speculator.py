"""Drafting with a model of another vocabulary, among the tokens that both vocabularies have (TLI).

The model runs over its own tokens. Its logits are reduced to the common tokens and indexed by the target's ids, so the
target's noise applies to them. Committed tokens become one or more of the draft's tokens, so positions in the draft's
KV cache differ from the target's; noise uses the target's positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.policy.step_cost import RowCost
from paceline.core.tree import TokenTree
from paceline.drafting.best_first import BestFirstRequest, BestFirstSpeculator, DraftPass
from paceline.drafting.draw_prediction import NetworkFacts
from paceline.drafting.speculator import Opening
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model.model import Model


@dataclass(slots=True, eq=False, kw_only=True)
class TranslatedRequest(BestFirstRequest):
    """`tokens` are the draft model's and count towards `limit`; the tree has the target's."""

    mapping: VocabularyMapping

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        return self.mapping.to_draft_tokens(tokens)

    @property
    def depth_limit(self) -> int:
        return min(self.opening.max_depth, self.limit - len(self.tokens))


class IntersectionSpeculator(BestFirstSpeculator[TranslatedRequest]):
    """Method `draft_model` with `vocabulary_mapping` `intersection`."""

    method = "draft_model"

    def __init__(
        self,
        model: Model,
        mapping: VocabularyMapping,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError if the vocabularies have too little in common."""
        mapping.require_common()
        common = mapping.common
        facts = replace(
            NetworkFacts.of_model(model),
            vocabulary_fingerprint=mapping.target.tokenizer.fingerprint,
            vocabulary_size=mapping.target.size,
            columns=len(common),
        )
        super().__init__(facts, tree_width, cost, least_path_probability, clock)
        self._model = model
        self._mapping = mapping
        self._columns = torch.tensor(common)
        self._ids = torch.tensor([mapping.target_ids[token] for token in common])

    def begin(
        self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float
    ) -> TranslatedRequest:
        tokens = self._mapping.prompt_to_draft_tokens(opening.tokens)
        return TranslatedRequest(
            opening, tree, history, least_path_log_prob, tokens, self.position_limit, mapping=self._mapping
        )

    def run(self, this: DraftPass[TranslatedRequest]) -> tuple[Tensor, Tensor | None]:
        logits = self._model.run(this.rows, this.wanted).logits
        if self._columns.device != logits.device:  # once
            self._columns, self._ids = self._columns.to(logits.device), self._ids.to(logits.device)
        return logits.index_select(-1, self._columns), self._ids
