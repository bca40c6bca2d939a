"""Builds speculators. The code of method `m` is the module `paceline.drafting.methods.m`, imported when it is used.

A method's module defines

    build(inputs) -> Speculator               required
    target_layers(inputs) -> Sequence[int]    its layers of hidden states, without building it; a head's default is the
                                              target's final state, the default of others is none
    matches(checkpoint) -> bool               whether a checkpoint without a method is for this one
    complete(config, checkpoint) -> config    `DraftMethod.completed`: sets keys that the user leaves out

Its facts, which need no code, are its row in `paceline.config.METHODS`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.config import METHODS, MODEL_METHODS, POOL, EngineConfig, SpeculativeConfig
from paceline.drafting.speculator import DraftingLimits, Speculator
from paceline.model_names import resolve_model

if TYPE_CHECKING:  # links import `paceline.drafting` where torch is not loaded
    from paceline.model.checkpoint import Checkpoint
    from paceline.model.model import Model
    from paceline.model.target_weights import TargetWeights

log = logging.getLogger(__name__)

UNPACKED = ("mlp_speculator", "medusa", "dflash", "dflash2", "dspark", "xpress")
"""Heads that torch computes: `EngineConfig.quantization` does not concern them."""
TargetWeightsProvider: TypeAlias = "Callable[[], TargetWeights]"
"""Loads the target's weights that drafts use. Called only for methods that use them."""


@dataclass(frozen=True)
class MethodInputs:
    """What a speculator is built from."""

    config: SpeculativeConfig
    engine: EngineConfig
    target_weights: TargetWeightsProvider
    target_model: str | None = None
    """The target by name, for a draft with another vocabulary."""

    @cached_property
    def target(self) -> TargetWeights:
        return self.target_weights()

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The draft's checkpoint; the target's if the configuration names none."""
        from paceline.model.checkpoint import Checkpoint

        return Checkpoint(self.target.folder if self.config.model is None else resolve_model(self.config.model))

    @property
    def limits(self) -> DraftingLimits:
        return DraftingLimits.of(self.config)

    @property
    def model(self) -> str:
        """The draft's checkpoint by name. Raises ValueError if the configuration names none."""
        if self.config.model is None:
            raise ValueError(f"method {self.config.method} needs `model`")
        return self.config.model

    def load_model(self) -> Model:
        """The draft model, with the engine's settings except the target's length limit and rank count."""
        from paceline.model import load

        size = self.config.draft_tensor_parallel_size
        settings = self.engine.model_copy(update={"max_model_len": None, "tensor_parallel_size": size})
        return load(self.model, settings)


def build_speculator(
    config: SpeculativeConfig,
    engine: EngineConfig,
    target_weights: TargetWeightsProvider,
    target_model: str | None = None,
) -> Speculator:
    """The speculator that `config` describes. `target_model`: see `MethodInputs`.

    Raises ValueError if the method drafts nothing or its checkpoint is unsuitable, `ModelNotFoundError` if a model is
    missing.
    """
    method = config.method
    if config.draft_tensor_parallel_size > 1 and method not in MODEL_METHODS:  # known once a checkpoint is detected
        raise ValueError(f"draft_tensor_parallel_size is for {' and '.join(MODEL_METHODS)}: set it to 1")
    if method == POOL:
        raise ValueError("method pool is for targets: give this draft worker a method or a model")
    if method not in METHODS:
        raise ValueError(f"method {method!r} drafts nothing")
    if engine.quantization is not None and method in UNPACKED:
        log.info("%s drafts with weights as they are stored: quantization is for layers of the Llama kind", method)
    inputs = MethodInputs(_chains_if_sampled(config), engine, target_weights, target_model)
    speculator = _build(inputs)
    if METHODS[method].kind in ("model", "head") and config.vocabulary_mapping == "none":
        from paceline.grammar.grammar_state import GrammarCompiler

        tokenizer = inputs.model if METHODS[method].kind == "model" else str(inputs.target.folder)
        speculator.grammars = GrammarCompiler.of(tokenizer, speculator.description.vocabulary_size)
    return speculator


def build_lookups(config: SpeculativeConfig) -> list[Speculator]:
    """The speculators of `config.beside`, which draft in the target's process.

    Each is built as if it were the only method, with its own keys: `model` is the other draft's. No engine's settings
    and no target's weights are at hand.
    """
    if not config.enabled:
        return []
    alone = _chains_if_sampled(config.model_copy(update={"model": None, "beside": ()}))
    configs = [alone.model_copy(update={"method": method}) for method in config.beside]
    return [_build(MethodInputs(each, EngineConfig(), _no_target)) for each in configs]


def hidden_state_layers(
    config: SpeculativeConfig, engine: EngineConfig, target_weights: TargetWeightsProvider
) -> Sequence[int]:
    """The target layers whose states the speculator of this configuration needs. Raises as `build_speculator` does."""
    if config.method == "custom_class":  # only the speculator knows
        return build_speculator(config, engine, target_weights).description.hidden_state_layers
    if config.method not in METHODS:
        return ()
    inputs = MethodInputs(config, engine, target_weights)
    if layers := method_hook(config.method, "target_layers"):
        return tuple(layers(inputs))
    return (inputs.target.final_layer,) if METHODS[config.method].kind == "head" else ()


def method_hook(method: str, name: str) -> Callable[..., Any] | None:
    """A function of a method's module; None if the module does not define it."""
    hook: Callable[..., Any] | None = getattr(_module(method), name, None)
    return hook


def _build(inputs: MethodInputs) -> Speculator:
    speculator: Speculator = _module(inputs.config.method).build(inputs)
    return speculator


def _chains_if_sampled(config: SpeculativeConfig) -> SpeculativeConfig:
    """Strategies with sampled drafts verify chains: the target drops a node's second child."""
    return config.model_copy(update={"tree_width": 1}) if config.strategy.sampled_drafts else config


def _module(method: str) -> Any:
    return importlib.import_module(f"paceline.drafting.methods.{method}")


def _no_target() -> TargetWeights:
    raise ValueError("a method without a model uses no weights of the target")
