"""Drafting with a small language model, of the target's vocabulary or of another one."""

from __future__ import annotations

from paceline.drafting.best_first import BestFirst, ModelNetwork
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.graphed_drafts import fastest_way
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.retokenizing_speculator import RetokenizingSpeculator
from paceline.drafting.speculator import Speculator
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping
from paceline.model.kept_row_cost import model_row_cost


def build(inputs: MethodInputs) -> Speculator:
    """The speculator for the configured `vocabulary_mapping`.

    Raises ValueError if the vocabularies have too little in common, `ModelNotFoundError` if a model is missing.
    """
    model = inputs.load_model()
    cost = model_row_cost(model, MAX_ROWS, inputs.engine.threads)
    best_first = BestFirst(ModelNetwork(model), inputs.limits, cost)
    if inputs.config.vocabulary_mapping == "none":
        return NetworkSpeculator(fastest_way(best_first))
    if inputs.target_model is None:
        raise ValueError("a vocabulary_mapping needs the name of the target, to read its tokenizer")
    mapping = VocabularyMapping.between(Vocabulary.load(inputs.target_model), Vocabulary.load(inputs.model))
    if mapping.identical:
        return NetworkSpeculator(fastest_way(best_first))
    if inputs.config.vocabulary_mapping == "intersection":
        return NetworkSpeculator(BestFirst(ModelNetwork(model, mapping=mapping), inputs.limits, cost))
    return RetokenizingSpeculator(NetworkSpeculator(best_first), mapping)
