"""Speculators of single methods, without a configuration or with the keys that matter."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.best_first import BestFirst, BestFirstRequest, ModelNetwork
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods import ngram, suffix
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftingLimits, Speculator
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model import Model
from paceline.model.target_weights import TargetWeights


def model_draft(
    model: Model,
    tree_width: int,
    cost: RowCost | None = None,
    least_path_probability: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> NetworkSpeculator[BestFirstRequest]:
    """Method `draft_model` over a model."""
    limits = DraftingLimits(tree_width, least_path_probability)
    return NetworkSpeculator(BestFirst(ModelNetwork(model), limits, cost, clock))


def intersection_draft(
    model: Model, mapping: VocabularyMapping, tree_width: int
) -> NetworkSpeculator[BestFirstRequest]:
    """Method `draft_model` with `vocabulary_mapping` `intersection`."""
    return NetworkSpeculator(BestFirst(ModelNetwork(model, mapping=mapping), DraftingLimits(tree_width)))


def ngram_draft(lookup_min: int, lookup_max: int, tree_width: int) -> Speculator:
    keys = {"prompt_lookup_min": lookup_min, "prompt_lookup_max": lookup_max, "tree_width": tree_width}
    config = SpeculativeConfig.model_validate({"method": "ngram"} | keys)
    return ngram.build(MethodInputs(config, EngineConfig(), _no_target))


def suffix_draft(config: SpeculativeConfig) -> Speculator:
    return suffix.build(MethodInputs(config, EngineConfig(), _no_target))


def _no_target() -> TargetWeights:
    raise AssertionError("a lookup has no target")
