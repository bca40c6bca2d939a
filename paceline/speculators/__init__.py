"""Methods that grow trees, one file each, behind `Speculator`."""

from __future__ import annotations

import importlib

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.speculators.base import Commit, Context, DraftError, Opening, Speculator

__all__ = ["Commit", "Context", "DraftError", "Opening", "Speculator", "build"]


def build(config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """The speculator that `config` describes; one with a model loads it by `engine`'s settings.

    Raises ValueError if there is none, or if a custom one is not what it says.
    """
    if config.method == "ngram":
        from paceline.speculators.ngram import NGram

        return NGram(config.prompt_lookup_min, config.prompt_lookup_max, config.tree_width)
    if config.method == "draft_model" and config.model is not None:
        from paceline.model import load
        from paceline.speculators.draft_model import DraftModel

        # The target's limit is not the draft's: a draft with fewer positions drafts as far as they go.
        return DraftModel(load(config.model, engine.model_copy(update={"max_model_len": None})), config.tree_width)
    if config.method == "custom" and config.speculator is not None:
        return _custom(config.speculator, config, engine)
    raise ValueError(f"method {config.method!r} drafts nothing")


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
