"""The decoder that a head's config.json describes, whoever wrote it.

Original uploads put the keys of a one-layer Llama at the top. The speculators library nests them, and leaves out what
is the default of transformers' class, so that only the class can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from paceline.model.checkpoint import Checkpoint, CheckpointError

DECODERS = ("llama", "qwen3")
"""What heads are made of. Others say `llama` in their uploads, too; tensors decide what there is."""
NOT_OF_A_DECODER = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype", "auto_map")


def draft_config(checkpoint: Checkpoint, rope_theta: float | None = None) -> PretrainedConfig:
    """A configuration with every key of a Llama. `rope_theta` overrides the checkpoint's, which is often wrong.

    Raises `CheckpointError` if it lacks the sizes, or they do not go together.
    """
    said: Mapping[str, Any] = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if "hidden_size" not in said and "transformer_layer_config" not in checkpoint.config:
        raise CheckpointError(f"config.json in {checkpoint} names no hidden_size: is it the configuration of a head?")
    keys = {key: value for key, value in said.items() if key not in NOT_OF_A_DECODER}
    if rope_theta is not None:
        keys = _with_theta(keys, rope_theta)
    try:
        return AutoConfig.for_model(_decoder(said, checkpoint), **keys)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json in {checkpoint} describes no decoder: {error}") from error


def is_of_the_speculators_library(checkpoint: Checkpoint) -> bool:
    return "speculators_model_type" in checkpoint.config


def _decoder(said: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    named = said.get("model_type")
    if named in DECODERS:
        return str(named)
    return "qwen3" if checkpoint.find("q_norm.weight") else "llama"


def _with_theta(keys: Mapping[str, Any], rope_theta: float) -> dict[str, Any]:
    changed = {**keys, "rope_theta": rope_theta}
    for nested in ("rope_parameters", "rope_scaling"):
        if isinstance(keys.get(nested), dict):
            changed[nested] = {**keys[nested], "rope_theta": rope_theta}
    return changed
