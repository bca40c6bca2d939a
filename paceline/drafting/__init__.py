"""Methods that grow trees, one file each, behind `Speculator`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.config import (
    HEADS,
    MAX_DEPTH,
    METHODS_READ_FROM_CHECKPOINT,
    POOL,
    SHAREABLE,
    EngineConfig,
    SpeculativeConfig,
)
from paceline.core.verify import strategy_of
from paceline.drafting.speculator import Commit, Context, DraftError, Opening, Speculator

if TYPE_CHECKING:  # links import this package, too, and run where no torch is loaded
    from paceline.model.target_weights import TargetWeights

__all__ = [
    "Commit",
    "Context",
    "DraftError",
    "Opening",
    "Speculator",
    "build_model_free",
    "build_speculator",
    "complete_config",
    "hidden_state_layers",
]

TargetPartsProvider: TypeAlias = "Callable[[], TargetWeights]"
"""Gives what the target lends. Called only for methods that draft from it."""


def complete_config(config: SpeculativeConfig, target: str | None = None) -> SpeculativeConfig:
    """With what checkpoints say where the user says nothing: the method, and how many tokens a DFlash draft guesses.

    `target`: by name, for method `auto`.

    Raises `CheckpointError` or `ModelNotFoundError` if there is no such checkpoint.
    """
    if config.method not in METHODS_READ_FROM_CHECKPOINT:
        return config
    from paceline.drafting.auto_method import resolve_auto
    from paceline.drafting.checkpoint_detection import detect_method

    config = detect_method(resolve_auto(config, target))
    if config.method != "dflash" or config.model is None or "num_speculative_tokens" in config.model_fields_set:
        return config
    from paceline.drafting.heads.dflash_config import tokens_per_pass
    from paceline.model.checkpoint import Checkpoint
    from paceline.model_names import resolve_model

    ahead = tokens_per_pass(Checkpoint(resolve_model(config.model)))
    return config.model_copy(update={"num_speculative_tokens": min(ahead, MAX_DEPTH)})


def build_speculator(
    config: SpeculativeConfig, engine: EngineConfig, lend: TargetPartsProvider, target_model: str | None = None
) -> Speculator:
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
        from paceline.drafting.method_registry import build_head

        return build_head(config, engine, lend())
    if config.method == "extract_hidden_states" and config.hidden_states_path is not None:
        return _extraction(config.hidden_states_path, config, lend())
    if config.method == "custom_class" and (path := config.speculator or config.model) is not None:
        return _custom(path, config, engine)
    if config.method == POOL:
        raise ValueError("method pool is for targets; say with which method or model this one drafts")
    raise ValueError(f"method {config.method!r} drafts nothing")


def build_model_free(config: SpeculativeConfig) -> list[Speculator]:
    """The speculators that draft in the target's process beside the other one."""
    return [MODEL_FREE[method](config) for method in config.beside] if config.enabled else []


def hidden_state_layers(config: SpeculativeConfig, engine: EngineConfig, lend: TargetPartsProvider) -> Sequence[int]:
    """What a speculator built from this configuration asks its target for.

    Raises ValueError as `build_speculator` does.
    """
    if config.method in HEADS:
        from paceline.drafting.method_registry import head_hidden_state_layers

        return head_hidden_state_layers(config, lend())
    if config.method == "extract_hidden_states":
        return _extraction_layers(config, lend())
    if config.method == "custom_class":  # only the speculator itself knows
        return build_speculator(config, engine, lend).hidden_state_layers
    return ()


def _draft_engine_config(engine: EngineConfig, config: SpeculativeConfig) -> EngineConfig:
    """The target's limit is not the draft's, which drafts as far as its positions go; nor are the target's ranks."""
    return engine.model_copy(update={"max_model_len": None, "tensor_parallel_size": config.draft_tensor_parallel_size})


def _draft_model(model: str, config: SpeculativeConfig, engine: EngineConfig, target_model: str | None) -> Speculator:
    from paceline.drafting.best_first import MAX_ROWS
    from paceline.drafting.methods.draft_model import DraftModelSpeculator
    from paceline.grammar.grammar_state import GrammarCompiler
    from paceline.model import load
    from paceline.model.row_probe import measure_row_cost

    draft = load(model, _draft_engine_config(engine, config))
    cost = measure_row_cost(draft, MAX_ROWS)
    if config.vocabulary_mapping == "none":
        speculator = DraftModelSpeculator(draft, config.tree_width, cost, config.least_path_probability)
        speculator.grammars = GrammarCompiler.of(model, draft.vocabulary_size)
        return speculator
    if target_model is None:
        raise ValueError("a vocabulary_mapping needs the name of the target, to read its tokenizer")
    from paceline.drafting.vocabulary.vocabulary_draft import build_vocabulary_draft

    return build_vocabulary_draft(draft, target_model, config, cost)


def _pard(model: str, config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    from paceline.drafting.methods.pard import PardSpeculator, mask_token_of
    from paceline.grammar.grammar_state import GrammarCompiler
    from paceline.model import load
    from paceline.model.checkpoint import Checkpoint
    from paceline.model_names import resolve_model

    mask_token = mask_token_of(Checkpoint(resolve_model(model)))
    draft = load(model, _draft_engine_config(engine, config))
    pard = PardSpeculator(
        draft, mask_token, config.num_speculative_tokens, config.tree_width, config.least_path_probability
    )
    pard.grammars = GrammarCompiler.of(model, draft.vocabulary_size)
    return pard


def _extraction(folder: str, config: SpeculativeConfig, lent: TargetWeights) -> Speculator:
    from paceline.drafting.methods.extract_hidden_states import ExtractHiddenStates

    return ExtractHiddenStates(Path(folder).expanduser(), _extraction_layers(config, lent))


def _extraction_layers(config: SpeculativeConfig, lent: TargetWeights) -> Sequence[int]:
    """What EAGLE-3 heads are fed with, and the state that all others are."""
    return config.eagle_aux_hidden_state_layer_ids or (2, lent.layers // 2, lent.layers - 3, lent.final_layer)


def _ngram(config: SpeculativeConfig) -> Speculator:
    from paceline.drafting.methods.ngram import NGramSpeculator

    width = 1 if strategy_of(config).sampled_drafts else config.tree_width
    return NGramSpeculator(config.prompt_lookup_min, config.prompt_lookup_max, width)


def _suffix(config: SpeculativeConfig) -> Speculator:
    from paceline.drafting.methods.suffix import SuffixSpeculator

    return SuffixSpeculator(config)


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
