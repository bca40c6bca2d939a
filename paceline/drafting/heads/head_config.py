"""The decoder configuration in a head's config.json, and checks of it that several methods share.

Original uploads have the keys of a one-layer Llama at the top level. The speculators library nests them, and omits keys
with the default value of transformers' configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from paceline.model.checkpoint import Checkpoint, CheckpointError, first_sentence
from paceline.model.layer_weights import RotaryTables, rotary_frequencies
from paceline.model.target_weights import TargetWeights

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import PretrainedConfig

DECODERS = ("llama", "qwen3")
"""Decoders of heads. Uploads of other decoders name `llama`, too; their tensors tell which they are."""
UNSUPPORTED_LAYER_TYPES = ("cohere", "deepseek", "kimi", "llama4", "minicpm", "mistral_large")
"""Prefixes of model types whose layers have the tensor names of a Llama and compute something else."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
MLA_TENSORS = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight")
"""Tensors of multi-head latent attention."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose angle at a position does not depend on the context's length."""
IGNORED_KEYS = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype", "auto_map")
FLOATS = ("rms_norm_eps", "rope_theta")


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """The keys of a Llama that names all sizes, does not scale its rotary embedding and attends to all positions. Most
    heads are such, and load without transformers, whose import takes seconds."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> PlainDecoder | None:
        """None if `keys` say less or more."""
        sizes: dict[str, Any] = {each.name: keys.get(each.name) for each in fields(cls)}
        scaled = any(keys.get(key) for key in ("rope_scaling", "rope_parameters", "partial_rotary_factor"))
        slides = keys.get("use_sliding_window") or not {"full_attention"}.issuperset(keys.get("layer_types") or ())
        others = scaled or slides or keys.get("hidden_act", "silu") != "silu"
        numbers = all(type(sizes[name]) is int or name in FLOATS for name in sizes)
        if others or not numbers or not all(type(size) in (int, float) and size > 0 for size in sizes.values()):
            return None
        whole = sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0 == sizes["head_dim"] % 2
        return cls(**sizes) if whole else None


def head_rotary(config: PlainDecoder | PretrainedConfig, positions: int, device: torch.device | str) -> RotaryTables:
    """Llama's, for so many positions."""
    if isinstance(config, PlainDecoder):
        return RotaryTables.at(rotary_frequencies(config.rope_theta, config.head_dim).to(device), positions)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return RotaryTables.of(LlamaRotaryEmbedding(config).to(device), positions)


def head_config(checkpoint: Checkpoint, rope_theta: float | None = None) -> PlainDecoder | PretrainedConfig:
    """A Llama's keys. `rope_theta` overrides the checkpoint's, which is often wrong.

    Raises `CheckpointError` if sizes are missing or inconsistent, or if layers of this kind cannot be run.
    """
    model_type, keys = _decoder_keys(checkpoint, rope_theta)
    return PlainDecoder.of(keys) or _transformers_config(checkpoint, model_type, keys)


def _decoder_keys(checkpoint: Checkpoint, rope_theta: float | None) -> tuple[str, Mapping[str, Any]]:
    """The decoder's type and keys. Raises `CheckpointError` if its layers cannot be run."""
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
    return model_type, keys


def _transformers_config(checkpoint: Checkpoint, model_type: str, keys: Mapping[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

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
    if others := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise CheckpointError(
            f"{checkpoint} has layers of type {min(others)!r} in layer_types, which cannot be run yet"
        )
    if config.hidden_act != "silu":
        raise CheckpointError(f"{checkpoint} has hidden_act {config.hidden_act!r}: only heads with 'silu' can be run")
    if (part := (config.rope_parameters or {}).get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(f"{checkpoint} has partial_rotary_factor {part!r}: only heads that rotate all can be run")
    rotary = (config.rope_parameters or {}).get("rope_type", "default")
    if rotary not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise CheckpointError(f"{checkpoint} has a rotary embedding of type {rotary!r}: only {known} can be run")


def windows(config: PlainDecoder | PretrainedConfig) -> Sequence[int]:
    """By layer, the positions that it sees; 0: all. The speculators library trains layers that slide unless told
    otherwise."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    size = int(getattr(config, "sliding_window", None) or 0)
    return [size if kind == "sliding_attention" else 0 for kind in types]


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
