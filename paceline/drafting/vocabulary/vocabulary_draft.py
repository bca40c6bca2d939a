"""A draft model with another vocabulary than the target's, by the way that the configuration names."""

from __future__ import annotations

from paceline.config import SpeculativeConfig
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Speculator
from paceline.drafting.vocabulary.intersection_draft import IntersectionDraft
from paceline.drafting.vocabulary.retokenized_draft import RetokenizedDraft
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping
from paceline.model.model import Model


def build_vocabulary_draft(model: Model, target: str, config: SpeculativeConfig, cost: RowCost) -> Speculator:
    """Raises `ModelNotFoundError` if a tokenizer is missing, ValueError if they have too little in common."""
    assert config.model is not None
    mapping = VocabularyMapping.between(Vocabulary.load(target), Vocabulary.load(config.model))
    if mapping.identical:
        return DraftModelSpeculator(model, config.tree_width, cost, config.least_path_probability)
    if config.vocabulary_mapping == "intersection":
        return IntersectionDraft(model, mapping, config.tree_width, cost, config.least_path_probability)
    return RetokenizedDraft(
        DraftModelSpeculator(model, config.tree_width, cost, config.least_path_probability), mapping
    )
