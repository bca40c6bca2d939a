"""Methods that grow trees, one file each, behind `Speculator`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.config import HEADS, MOST_DEPTH, POOL, SHAREABLE, TOLD_BY_CHECKPOINT, EngineConfig, SpeculativeConfig
from paceline.speculators.base import Commit, Context, DraftError, Opening, Speculator
from paceline.verify import strategy_of

if TYPE_CHECKING:  # links import this package, too, and run where no torch is loaded
    from paceline.model.lending import Lent

__all__ = [
    "Commit",
    "Context",
    "DraftError",
    "Opening",
    "Speculator",
    "build",
    "build_beside",
    "completed",
    "hidden_state_layers",
]

Lend: TypeAlias = "Callable[[], Lent]"
"""Gives what the target lends. Called only for methods that draft from it."""


def completed(config: SpeculativeConfig, target: str | None = None) -> SpeculativeConfig:
    """With what checkpoints say where the user says nothing: the method, and how many tokens a DFlash draft guesses.

    `target`: by name, for method `auto`.

    Raises `CheckpointError` or `ModelNotFoundError` if there is no such checkpoint.
    """
    if config.method not in TOLD_BY_CHECKPOINT:
        return config
    from paceline.speculators.auto import picked
    from paceline.speculators.formats import detected

    config = detected(picked(config, target))
    if config.method != "dflash" or config.model is None or "num_speculative_tokens" in config.model_fields_set:
        return config
    from paceline.model.checkpoint import Checkpoint
    from paceline.models import resolve_model
    from paceline.speculators.dflash_kind import ahead_of

    ahead = ahead_of(Checkpoint(resolve_model(config.model)))
    return config.model_copy(update={"num_speculative_tokens": min(ahead, MOST_DEPTH)})


def build(config: SpeculativeConfig, engine: EngineConfig, lend: Lend, target_model: str | None = None) -> Speculator:
    """The speculator that `config` describes; one with a model loads it by `engine`'s settings.

    `target_model`: the target by name, which a draft with another vocabulary has to know.

    Raises ValueError if there is none, or if it is not what it says; `ModelNotFoundError` if a model is not there.
    """
    if config.draft_tensor_parallel_size > 1 and config.method not in SHAREABLE:  # as its checkpoint says
        raise ValueError(f"draft_tensor_parallel_size is for {' and '.join(SHAREABLE)}: set it to 1")
    if config.method in MODEL_FREE:
        return MODEL_FREE[config.method](config)
    if config.method == "draft_model" and config.model is not None:
        return _draft_model(config.model, config, engine, target_model)
    if config.method == "pard" and config.model is not None:
        return _pard(config.model, config, engine)
    if config.method in HEADS:
        from paceline.speculators.heads import build_head

        return build_head(config, engine, lend())
    if config.method == "extract_hidden_states" and config.hidden_states_path is not None:
        return _extraction(config.hidden_states_path, config, lend())
    if config.method == "custom_class" and (path := config.speculator or config.model) is not None:
        return _custom(path, config, engine)
    if config.method == POOL:
        raise ValueError("method pool is for targets; say with which method or model this one drafts")
    raise ValueError(f"method {config.method!r} drafts nothing")


def build_beside(config: SpeculativeConfig) -> list[Speculator]:
    """The speculators that draft in the target's process beside the other one."""
    return [MODEL_FREE[method](config) for method in config.beside] if config.enabled else []


def hidden_state_layers(config: SpeculativeConfig, engine: EngineConfig, lend: Lend) -> Sequence[int]:
    """What a speculator built from this configuration asks its target for.

    Raises ValueError as `build` does.
    """
    if config.method in HEADS:
        from paceline.speculators.heads import layers_of_head

        return layers_of_head(config, lend())
    if config.method == "extract_hidden_states":
        return _extracted_layers(config, lend())
    if config.method == "custom_class":  # only the speculator itself knows
        return build(config, engine, lend).hidden_state_layers
    return ()


def _of_the_draft(engine: EngineConfig, config: SpeculativeConfig) -> EngineConfig:
    """The target's limit is not the draft's, which drafts as far as its positions go; nor are the target's ranks."""
    return engine.model_copy(update={"max_model_len": None, "tensor_parallel_size": config.draft_tensor_parallel_size})


def _draft_model(model: str, config: SpeculativeConfig, engine: EngineConfig, target_model: str | None) -> Speculator:
    from paceline.grammar.following import Grammars
    from paceline.model import load
    from paceline.model.probe import row_cost
    from paceline.speculators.best_first import MOST_ROWS
    from paceline.speculators.draft_model import DraftModel

    draft = load(model, _of_the_draft(engine, config))
    cost = row_cost(draft, MOST_ROWS)
    if config.vocabulary_mapping == "none":
        speculator = DraftModel(draft, config.tree_width, cost, config.least_path_probability)
        speculator.grammars = Grammars.of(model, draft.vocabulary_size)
        return speculator
    if target_model is None:
        raise ValueError("a vocabulary_mapping needs the name of the target, to read its tokenizer")
    from paceline.speculators.foreign import foreign_draft

    return foreign_draft(draft, target_model, config, cost)


def _pard(model: str, config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    from paceline.grammar.following import Grammars
    from paceline.model import load
    from paceline.model.checkpoint import Checkpoint
    from paceline.models import resolve_model
    from paceline.speculators.pard import Pard, mask_token_of

    mask_token = mask_token_of(Checkpoint(resolve_model(model)))
    draft = load(model, _of_the_draft(engine, config))
    pard = Pard(draft, mask_token, config.num_speculative_tokens, config.tree_width, config.least_path_probability)
    pard.grammars = Grammars.of(model, draft.vocabulary_size)
    return pard


def _extraction(folder: str, config: SpeculativeConfig, lent: Lent) -> Speculator:
    from paceline.speculators.extract_hidden_states import ExtractHiddenStates

    return ExtractHiddenStates(Path(folder).expanduser(), _extracted_layers(config, lent))


def _extracted_layers(config: SpeculativeConfig, lent: Lent) -> Sequence[int]:
    """What EAGLE-3 heads are fed with, and the state that all others are."""
    return config.eagle_aux_hidden_state_layer_ids or (2, lent.layers // 2, lent.layers - 3, lent.final)


def _ngram(config: SpeculativeConfig) -> Speculator:
    from paceline.speculators.ngram import NGram

    width = 1 if strategy_of(config).by_law else config.tree_width
    return NGram(config.prompt_lookup_min, config.prompt_lookup_max, width)


def _suffix(config: SpeculativeConfig) -> Speculator:
    from paceline.speculators.suffix import Suffix

    return Suffix(config)


MODEL_FREE: dict[str, Callable[[SpeculativeConfig], Speculator]] = {"ngram": _ngram, "suffix": _suffix}


def _custom(path: str, config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """Call the class or factory at a dotted path `package.module.name` with both configurations."""
    module, _, name = path.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"speculator {path!r} cannot be imported: {error}") from error
    speculator = factory(config, engine)
    if not isinstance(speculator, Speculator):
        raise ValueError(f"speculator {path!r} made a {type(speculator).__name__}, which is no Speculator")
    return speculator
