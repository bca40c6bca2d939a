"""A draft model with another vocabulary than the target's, by the way that the configuration names."""

from __future__ import annotations

from paceline.budget import RowCost
from paceline.config import SpeculativeConfig
from paceline.model.model import Model
from paceline.speculators.base import Speculator
from paceline.speculators.draft_model import DraftModel
from paceline.speculators.intersection import IntersectionDraft
from paceline.speculators.strings import StringDraft
from paceline.speculators.vocabularies import Vocabulary, VocabularyMapping


def foreign_draft(model: Model, target: str, config: SpeculativeConfig, cost: RowCost) -> Speculator:
    """Raises `ModelNotFoundError` if a tokenizer is missing, ValueError if they have too little in common."""
    assert config.model is not None
    mapping = VocabularyMapping.between(Vocabulary.load(target), Vocabulary.load(config.model))
    if mapping.alike:
        return DraftModel(model, config.tree_width, cost, config.least_path_probability)
    if config.vocabulary_mapping == "intersection":
        return IntersectionDraft(model, mapping, config.tree_width, cost, config.least_path_probability)
    return StringDraft(DraftModel(model, config.tree_width, cost, config.least_path_probability), mapping)
