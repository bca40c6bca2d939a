"""Methods that grow trees, one file each, behind `Speculator`."""

from __future__ import annotations

import importlib

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.speculators.base import Commit, Context, DraftError, Opening, Speculator

__all__ = ["Commit", "Context", "DraftError", "Opening", "Speculator", "build", "build_beside"]


def build(config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """The speculator that `config` describes; one with a model loads it by `engine`'s settings.

    Raises ValueError if there is none, or if a custom one is not what it says.
    """
    if config.method == "ngram":
        return _ngram(config)
    if config.method == "draft_model" and config.model is not None:
        from paceline.model import load
        from paceline.model.probe import row_cost
        from paceline.speculators.best_first import MOST_ROWS
        from paceline.speculators.draft_model import DraftModel

        # The target's limit is not the draft's: a draft with fewer positions drafts as far as they go.
        model = load(config.model, engine.model_copy(update={"max_model_len": None}))
        return DraftModel(model, config.tree_width, row_cost(model, MOST_ROWS), config.least_path_probability)
    if config.method == "custom" and config.speculator is not None:
        return _custom(config.speculator, config, engine)
    raise ValueError(f"method {config.method!r} drafts nothing")


def build_beside(config: SpeculativeConfig) -> Speculator | None:
    """The speculator that drafts in the target's process beside the other one, if one is to."""
    return _ngram(config) if config.enabled and config.beside == "ngram" else None


def _ngram(config: SpeculativeConfig) -> Speculator:
    from paceline.speculators.ngram import NGram

    return NGram(config.prompt_lookup_min, config.prompt_lookup_max, config.tree_width)


def _custom(path: str, config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """Call the factory at a dotted path `package.module.factory` with both configurations."""
    module, _, name = path.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"speculator {path!r} cannot be imported: {error}") from error
    speculator = factory(config, engine)
    if not isinstance(speculator, Speculator):
        raise ValueError(f"speculator {path!r} made a {type(speculator).__name__}, which is no Speculator")
    return speculator
