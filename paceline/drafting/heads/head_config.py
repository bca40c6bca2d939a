"""The decoder that a head's config.json describes, whoever wrote it.

Original uploads put the keys of a one-layer Llama at the top. The speculators library nests them, and leaves out what
is the default of transformers' class, so that only the class can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from paceline.model.checkpoint import Checkpoint, CheckpointError, first_sentence

DECODERS = ("llama", "qwen3")
"""What heads are made of. Others say `llama` in their uploads, too; tensors decide what there is."""
UNSUPPORTED_LAYER_TYPES = ("cohere", "deepseek", "kimi", "llama4", "minicpm", "mistral_large")
"""How the types of layers begin that have a Llama's names and compute something else."""
MLA_TENSORS = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight")
"""Tensors of multi-head latent attention."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those that turn a position by the same angle however long the context is."""
IGNORED_KEYS = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype", "auto_map")


def head_config(checkpoint: Checkpoint, rope_theta: float | None = None) -> PretrainedConfig:
    """A configuration with every key of a Llama. `rope_theta` overrides the checkpoint's, which is often wrong.

    Raises `CheckpointError` if it lacks the sizes, or they do not go together.
    """
    said: Mapping[str, Any] = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if not said:
        raise CheckpointError(f"{checkpoint} has no config.json: without it nobody knows what its tensors are")
    if "hidden_size" not in said and "transformer_layer_config" not in checkpoint.config:
        raise CheckpointError(f"config.json in {checkpoint} names no hidden_size: is it the configuration of a head?")
    _refuse_families(said, checkpoint)
    keys = {key: value for key, value in said.items() if key not in IGNORED_KEYS}
    if rope_theta is not None:
        keys = _with_theta(keys, rope_theta)
    try:
        config = AutoConfig.for_model(_decoder(said, checkpoint), **keys)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json in {checkpoint} describes no decoder: {first_sentence(error)}") from error
    _refuse_unknown(config, checkpoint)
    return config


def is_speculators_format(checkpoint: Checkpoint) -> bool:
    return "speculators_model_type" in checkpoint.config


def _refuse_families(said: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    if any(checkpoint.find(name) for name in MLA_TENSORS):
        raise CheckpointError(f"{checkpoint} is a head with multi-head latent attention, which cannot be run yet")
    named = str(said.get("model_type"))
    if named.startswith(UNSUPPORTED_LAYER_TYPES):
        raise CheckpointError(f"{checkpoint} is a head with layers of type {named!r}, which cannot be run yet")


def _refuse_unknown(config: Any, checkpoint: Checkpoint) -> None:
    if config.hidden_act != "silu":
        raise CheckpointError(f"{checkpoint} has hidden_act {config.hidden_act!r}: only heads with 'silu' can be run")
    rotary = (config.rope_parameters or {}).get("rope_type", "default")
    if rotary not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise CheckpointError(f"{checkpoint} has a rotary embedding of type {rotary!r}: only {known} can be run")


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
