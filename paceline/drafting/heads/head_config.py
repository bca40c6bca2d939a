"""The decoder configuration in a head's config.json, and checks of it that several methods share.

Original uploads have the keys of a one-layer Llama at the top level. The speculators library nests them, and omits keys
with the default value of transformers' configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from paceline.model.checkpoint import Checkpoint, CheckpointError, first_sentence
from paceline.model.target_weights import TargetWeights

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import PretrainedConfig

DECODERS = ("llama", "qwen3")
"""Decoders of heads. Uploads of other decoders name `llama`, too; their tensors tell which they are."""
UNSUPPORTED_LAYER_TYPES = ("cohere", "deepseek", "kimi", "llama4", "minicpm", "mistral_large")
"""Prefixes of model types whose layers have the tensor names of a Llama and compute something else."""
MLA_TENSORS = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight")
"""Tensors of multi-head latent attention."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose angle at a position does not depend on the context's length."""
IGNORED_KEYS = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype", "auto_map")


def head_config(checkpoint: Checkpoint, rope_theta: float | None = None) -> PretrainedConfig:
    """A configuration with every key of a Llama. `rope_theta` overrides the checkpoint's, which is often wrong.

    Raises `CheckpointError` if sizes are missing or inconsistent, or if layers of this kind cannot be run.
    """
    from transformers import AutoConfig

    decoder: Mapping[str, Any] = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if not decoder:
        raise CheckpointError(f"{checkpoint} has no config.json: download it, the tensors alone do not tell their use")
    if "hidden_size" not in decoder and "transformer_layer_config" not in checkpoint.config:
        raise CheckpointError(f"config.json in {checkpoint} names no hidden_size: is it the configuration of a head?")
    if any(checkpoint.find(name) for name in MLA_TENSORS):
        raise CheckpointError(f"{checkpoint} is a head with multi-head latent attention, which cannot be run yet")
    model_type = str(decoder.get("model_type"))
    if model_type.startswith(UNSUPPORTED_LAYER_TYPES):
        raise CheckpointError(f"{checkpoint} is a head with layers of type {model_type!r}, which cannot be run yet")
    if model_type not in DECODERS:
        model_type = "qwen3" if checkpoint.find("q_norm.weight") else "llama"
    keys = {key: value for key, value in decoder.items() if key not in IGNORED_KEYS}
    if rope_theta is not None:
        keys["rope_theta"] = rope_theta
        for nested in ("rope_parameters", "rope_scaling"):
            if isinstance(keys.get(nested), dict):
                keys[nested] = {**keys[nested], "rope_theta": rope_theta}
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json in {checkpoint} describes no decoder: {first_sentence(error)}") from error
    _refuse_unsupported(config, checkpoint)
    return config


def _refuse_unsupported(config: Any, checkpoint: Checkpoint) -> None:
    if config.num_hidden_layers < 1:
        raise CheckpointError(f"{checkpoint} has num_hidden_layers {config.num_hidden_layers}: a head has 1 or more")
    if not isinstance(theta := (config.rope_parameters or {}).get("rope_theta"), int | float):
        raise CheckpointError(f"{checkpoint} has rope_theta {theta!r}, and no number")
    if config.hidden_act != "silu":
        raise CheckpointError(f"{checkpoint} has hidden_act {config.hidden_act!r}: only heads with 'silu' can be run")
    rotary = (config.rope_parameters or {}).get("rope_type", "default")
    if rotary not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise CheckpointError(f"{checkpoint} has a rotary embedding of type {rotary!r}: only {known} can be run")


def is_speculators_format(checkpoint: Checkpoint) -> bool:
    """Whether the speculators library wrote the checkpoint."""
    return "speculators_model_type" in checkpoint.config


def mask_token(checkpoint: Checkpoint, settings: Mapping[str, Any], keys: Sequence[str], rows: int | None) -> int:
    """The mask token: the value of the first of `keys` that `settings` has.

    Raises `CheckpointError` if there is none, or if the embedding has no such row among its `rows`; None: not checked.
    """
    token = next((settings[key] for key in keys if settings.get(key) is not None), None)
    if token is None:
        raise CheckpointError(
            f"config.json in {checkpoint} names no {keys[0]}: it is incomplete, or not of the configured method"
        )
    if not isinstance(token, int) or token < 0 or (rows is not None and token >= rows):
        size = "" if rows is None else f" of {rows} tokens"
        raise CheckpointError(f"{keys[0]} {token!r} in {checkpoint} is no row of its embedding{size}")
    return token


def require_hidden_size(checkpoint: Checkpoint, target: TargetWeights, size: int) -> None:
    """Raises `CheckpointError` if the head needs hidden states of another size than the target's."""
    if size != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint} is a head for hidden size {size}, {target.name} has {target.hidden_size}: choose one for it"
        )


def require_layers(checkpoint: Checkpoint, target: TargetWeights, layers: Sequence[int], advice: str) -> None:
    """Raises `CheckpointError` if the target has no such layer. 0 is its embedding."""
    if any(not 0 <= layer <= target.layers for layer in layers):
        raise CheckpointError(
            f"{checkpoint} needs the states of layers {list(layers)}, {target.name} has {target.layers}: {advice}"
        )
