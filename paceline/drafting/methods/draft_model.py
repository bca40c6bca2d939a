"""Drafting with a small language model, of the target's vocabulary or of another one."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.policy.step_cost import RowCost
from paceline.core.tree import TokenTree
from paceline.drafting.best_first import BestFirstRequest, BestFirstSpeculator, DraftPass
from paceline.drafting.draw_prediction import MAX_ROWS, NetworkFacts
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Opening, Speculator
from paceline.drafting.vocabulary.intersection_speculator import IntersectionSpeculator
from paceline.drafting.vocabulary.retokenizing_speculator import RetokenizingSpeculator
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping
from paceline.model.kept_row_cost import model_row_cost
from paceline.model.model import Model


class DraftModelSpeculator(BestFirstSpeculator[BestFirstRequest]):
    """Method `draft_model` with the target's vocabulary."""

    method = "draft_model"

    def __init__(
        self,
        model: Model,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(NetworkFacts.of_model(model), tree_width, cost, least_path_probability, clock)
        self._model = model

    def begin(
        self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float
    ) -> BestFirstRequest:
        return BestFirstRequest(opening, tree, history, least_path_log_prob, list(opening.tokens), self.position_limit)

    def run(self, this: DraftPass[BestFirstRequest]) -> tuple[Tensor, Tensor | None]:
        return self._model.run(this.rows, this.wanted).logits, None


def build(inputs: MethodInputs) -> Speculator:
    """The speculator for the configured `vocabulary_mapping`.

    Raises ValueError if the vocabularies have too little in common, `ModelNotFoundError` if a model is missing.
    """
    config = inputs.config
    model = inputs.load_model()
    cost = model_row_cost(model, MAX_ROWS, inputs.engine.threads)
    draft_model = DraftModelSpeculator(model, config.tree_width, cost, config.least_path_probability)
    if config.vocabulary_mapping == "none":
        return draft_model
    if inputs.target_model is None:
        raise ValueError("a vocabulary_mapping needs the name of the target, to read its tokenizer")
    mapping = VocabularyMapping.between(Vocabulary.load(inputs.target_model), Vocabulary.load(inputs.model))
    if mapping.identical:
        return draft_model
    if config.vocabulary_mapping == "intersection":
        return IntersectionSpeculator(model, mapping, config.tree_width, cost, config.least_path_probability)
    return RetokenizingSpeculator(draft_model, mapping)
