"""Drafting with a model of another vocabulary, among the tokens that both vocabularies have (TLI).

The model runs over its own tokens. Its logits are reduced to the common tokens and indexed by the target's ids, so the
target's noise applies to them. Committed tokens become one or more of the draft's tokens, so positions in the draft's
KV cache differ from the target's; noise uses the target's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.drafting.best_first import ModelNetwork, RowOutput
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model.model import Model
from paceline.model.rows import Row


class IntersectionNetwork(ModelNetwork):
    """Method `draft_model` with `vocabulary_mapping` `intersection`."""

    def __init__(self, model: Model, mapping: VocabularyMapping) -> None:
        """Raises ValueError if the vocabularies have too little in common."""
        mapping.require_common()
        super().__init__(model)
        target, common = mapping.target, mapping.common
        self.description = replace(
            self.description, vocabulary_fingerprint=target.tokenizer.fingerprint, vocabulary_size=target.size
        )
        self._mapping = mapping
        self._columns = torch.tensor(common)
        self.ids = torch.tensor([mapping.target_ids[token] for token in common])

    def inputs_of_prompt(self, tokens: Sequence[int]) -> list[int]:
        return self._mapping.prompt_to_draft_tokens(tokens)

    def inputs_of(self, tokens: Sequence[int]) -> list[int]:
        return self._mapping.to_draft_tokens(tokens)

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        logits = super().run(rows, features, wanted).logits
        if self.ids is not None and self.ids.device != logits.device:  # once
            self._columns, self.ids = self._columns.to(logits.device), self.ids.to(logits.device)
        return RowOutput(logits.index_select(-1, self._columns))
