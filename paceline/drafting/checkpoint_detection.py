"""Finds the method that a checkpoint is for, by its tensors and by keys that only this kind of checkpoint has.

`architectures` in config.json is no evidence: published heads name the class of a plain Llama.
"""

from __future__ import annotations

import logging

from paceline.config import DETECT, METHODS, SpeculativeConfig
from paceline.drafting.method_registry import method_hook
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import is_fake_model, resolve_model

log = logging.getLogger(__name__)

DSPARK, XPRESS = "dspark", "xpress"
"""Formats that are known and not supported."""
SPECULATORS_LIBRARY_TYPES = {name: name for name in ("eagle", "eagle3", "peagle", "dflash", DSPARK, XPRESS, "mtp")} | {
    "dflash2": "dflash"  # which refuses it by name
}
"""The method, by the speculators library's name for the type of a checkpoint."""


def detect_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with the checkpoint's method in place of `detect`.

    Raises `CheckpointError` if the method is unknown or unsupported, `ModelNotFoundError` if there is no checkpoint.
    """
    if config.method != DETECT or config.model is None:
        return config
    folder = resolve_model(config.model)
    method = "draft_model" if is_fake_model(folder) else method_of_checkpoint(Checkpoint(folder))
    if method not in METHODS:
        raise CheckpointError(f"{folder} is a checkpoint for method {method!r}, which is known and not supported")
    log.info("%s is a checkpoint for method %s", folder, method)
    return config.model_copy(update={"method": method})


def method_of_checkpoint(checkpoint: Checkpoint) -> str:
    """The method of a checkpoint, supported or not. Raises `CheckpointError` if a file cannot be read."""
    library_type = checkpoint.config.get("speculators_model_type")
    if library_type is None:
        return _matching_method(checkpoint)
    if library_type not in SPECULATORS_LIBRARY_TYPES:
        raise CheckpointError(
            f"{checkpoint} is of type {library_type!r} of the speculators library, which is not known here"
        )
    return SPECULATORS_LIBRARY_TYPES[library_type]


def _matching_method(checkpoint: Checkpoint) -> str:
    """The first method that matches; without a match the checkpoint is a language model."""
    if "markov_rank" in checkpoint.config and "dflash_config" not in checkpoint.config:
        return DSPARK
    for method in METHODS:
        matches = method_hook(method, "matches")
        if matches and matches(checkpoint):
            return method
    return "draft_model"
