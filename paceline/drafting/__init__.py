"""Speculators: what grows token trees. `speculator` is the interface, `methods` has one file for each method."""

from __future__ import annotations

from paceline.config import METHODS, METHODS_READ_FROM_CHECKPOINT, SpeculativeConfig
from paceline.drafting.method_registry import (
    TargetWeightsProvider,
    build_lookups,
    build_speculator,
    hidden_state_layers,
    method_hook,
)
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator
from paceline.model_names import resolve_model

__all__ = [
    "Commit",
    "Context",
    "DraftError",
    "Limit",
    "Opening",
    "Speculator",
    "TargetWeightsProvider",
    "build_lookups",
    "build_speculator",
    "complete_config",
    "hidden_state_layers",
]


def complete_config(config: SpeculativeConfig, target: str | None = None) -> SpeculativeConfig:
    """The configuration with what checkpoints set where the user sets nothing: the method, and keys of the method.

    `target`: by name, for method `auto`. Raises `CheckpointError` or `ModelNotFoundError`.
    """
    if config.method not in METHODS_READ_FROM_CHECKPOINT:
        return config
    # Not at the top: these import torch.
    from paceline.drafting.auto_method import resolve_auto
    from paceline.drafting.checkpoint_detection import detect_method
    from paceline.model.checkpoint import Checkpoint

    config = detect_method(resolve_auto(config, target))
    complete = method_hook(config.method, "complete") if config.method in METHODS and config.model else None
    return complete(config, Checkpoint(resolve_model(config.model or ""))) if complete else config
