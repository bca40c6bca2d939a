"""The configuration of a GGUF file in transformers' terms: what config.json says of other checkpoints.

llama.cpp writes its metadata under the name of an architecture: `qwen2.block_count`. Numbers that it computes
and a file lacks have its values here. A fault of a file is a `GgufError` that names the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.gguf import gguf_states
from paceline.gguf.gguf_file import GgufError, GgufFile
from paceline.gguf.gguf_keys import Keys
from paceline.gguf.gguf_rope import DEFAULT_BASE, floats, rope

PACKED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite"})
"""transformers' model types whose matrices can be computed as the file has them."""
STATE_UNIT = 16
"""Native code keeps states of heads whose size is a multiple of it."""
SQUARE_QUERY_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by the width per head; llama.cpp knows them by this number."""
GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 has full attention."""
IGNORED_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Rotary factors, which are part of the configuration."""


class GgufSettings(SimpleNamespace):
    """A configuration with the two methods of transformers' own that are used here; it takes no transformers."""

    def to_dict(self) -> dict[str, Any]:
        """All settings."""
        return dict(vars(self))

    def get_text_config(self, decoder: bool | None = None) -> GgufSettings:
        """Itself: the model is a text model."""
        return self


def is_packed_kind(config: Mapping[str, Any]) -> bool:
    """Whether native code computes this model with matrices as the file has them. `config`: `transformers_config`'s."""
    kind = config.get("model_type")
    if kind == "qwen3_5_text":
        return not config["linear_key_head_dim"] % STATE_UNIT  # values have the same
    return kind in PACKED_MODEL_TYPES


def transformers_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json. Raises `GgufError` for a kind that is not read here and for missing or wrong keys."""
    architecture = file.need("general.architecture", str)
    if architecture not in KINDS:
        raise GgufError(f"{file.path} is of the kind {architecture!r}, which is not read here: {', '.join(KINDS)} are")
    keys = Keys(file, architecture)
    kind = KINDS[architecture]
    config = {
        "model_type": kind.model_type,
        "architectures": [kind.network],
        "dtype": "float32" if file.tensor("token_embd.weight").type.name == "F32" else "bfloat16",
        **_sizes(keys),
        **_vocabulary(file),
    }
    settings = config | kind.settings(keys, config)
    if architecture in gguf_states.ARCHITECTURES:
        keys.refuse_others(gguf_states.HARMLESS)
    return settings


def _sizes(keys: Keys) -> dict[str, Any]:
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    kv_heads = (
        keys.count_of_layers("attention.head_count_kv", zeros=keys.architecture in gguf_states.BY_KV_HEADS) or heads
    )
    if heads % (kv_heads or heads):
        raise keys.error("attention.head_count_kv", f"is {kv_heads}, which does not divide the {heads} heads")
    head_dim = keys.optional_count("attention.key_length", hidden // heads)
    if keys.optional_count("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"is not attention.key_length, {head_dim}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
    }


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    """Raises `GgufError` if there is not a row of the embedding for each token."""
    rows = file.tensor("token_embd.weight").shape[0]
    tokens = file.get("tokenizer.ggml.tokens", list)
    if tokens is not None and len(tokens) != rows:
        raise GgufError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight has {rows} rows"
        )
    return {
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": None,  # transformers' own default may lie outside the vocabulary
    }


def _layers(keys: Keys, width: str = "feed_forward_length") -> dict[str, Any]:
    """Of a model with gated layers and root mean square norms."""
    return {"intermediate_size": keys.count(width), "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _gated(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """As `_layers`, with one rotary table."""
    return {**_layers(keys), "rope_parameters": rope(keys, config)}


def _llama(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    if (experts := keys.optional_count("expert_count")) is not None:
        raise keys.error("expert_count", f"is {experts}: mixtures of experts in files of this kind are not read here")
    biases = {
        "attention_bias": keys.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
    }
    return {**_gated(keys, config), **biases}


def _mistral3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral Small 3, or Ministral 3, which scales queries by their position."""
    settings = _gated(keys, config)
    beta = keys.optional_number("attention.temperature_scale")
    if beta is None:
        return {**settings, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    if settings["rope_parameters"]["rope_type"] != "yarn":
        raise keys.error("rope.scaling.type", "is not yarn, but attention.temperature_scale needs its length")
    rotary = {**settings["rope_parameters"], "llama_4_scaling_beta": beta}
    return {**settings, "rope_parameters": rotary, "sliding_window": None}


def _qwen3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gated(keys, config), "attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


def _gemma2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gated(keys, config),
        "query_pre_attn_scalar": _query_scalar(keys, config),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": _layer_types(config, lambda layer: layer % 2 == 1),
        "attn_logit_softcapping": keys.optional_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    local = keys.optional_number("rope.freq_base_swa", DEFAULT_BASE)
    settings = _gated(keys, config)
    return {
        **settings,
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scalar(keys, config),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": _gemma3_layers(keys, config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
    }


def _query_scalar(keys: Keys, config: Mapping[str, Any]) -> int:
    """What queries are divided by the root of: the size of a head, or in the largest model the width per head."""
    if config["num_hidden_layers"] == SQUARE_QUERY_LAYERS[keys.architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3_layers(keys: Keys, config: Mapping[str, Any]) -> list[str]:
    stored = keys.file.get(f"{keys.architecture}.attention.sliding_window_pattern", (int, list), GEMMA3_PATTERN)
    if isinstance(stored, int):
        return _layer_types(config, lambda layer: (layer + 1) % stored == 0)
    if len(stored) != config["num_hidden_layers"]:
        raise keys.error("attention.sliding_window_pattern", f"has {len(stored)} layers, and block_count others")
    return _layer_types(config, lambda layer: not stored[layer])


def _layer_types(config: Mapping[str, Any], is_full: Callable[[int], bool]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    return ["full_attention" if is_full(layer) else "sliding_attention" for layer in layers]


def _phi3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = keys.optional_count("rope.dimension_count", config["head_dim"]) or 0
    original = keys.optional_count("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        **_layers(keys),
        "rope_parameters": {
            "rope_theta": keys.optional_number("rope.freq_base", DEFAULT_BASE),
            "partial_rotary_factor": rotated / config["head_dim"],
            **_longrope(keys, original or 0),
        },
        "original_max_position_embeddings": original,
        "sliding_window": keys.optional_count("attention.sliding_window"),
    }


def _longrope(keys: Keys, original: int) -> dict[str, Any]:
    if not keys.has_tensor("rope_factors_long.weight"):
        return {"rope_type": "default"}
    factors = {f"{way}_factor": floats(keys.file, f"rope_factors_{way}.weight").tolist() for way in ("long", "short")}
    attention = keys.optional_number("rope.scaling.attn_factor")
    found = {} if attention is None else {"attention_factor": attention}
    return {"rope_type": "longrope", **factors, "original_max_position_embeddings": original, **found}


def _starcoder2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": keys.count("feed_forward_length"),
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "rope_parameters": rope(keys, config),
        "sliding_window": keys.optional_count("attention.sliding_window"),
        "use_bias": True,
    }


def _experts(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = keys.count("expert_shared_feed_forward_length")
    own = {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return {**_gated(keys, config), **_experts(keys), **own}


def _qwen3moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gated(keys, config), **_experts(keys), "norm_topk_prob": True}


def _gpt_oss(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    rotary = rope(keys, config)
    return {
        **_layers(keys, "expert_feed_forward_length"),
        "rope_parameters": {**rotary, "truncate": False} if rotary["rope_type"] == "yarn" else rotary,
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": _layer_types(config, lambda layer: layer % 2 == 1),
        "attention_bias": True,
    }


def _granite(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_llama(keys, config),
        "attention_multiplier": keys.optional_number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.optional_number("embedding_scale", 1.0),
        "residual_multiplier": keys.optional_number("residual_scale", 1.0),
        "logits_scaling": keys.optional_number("logit_scale", 1.0),
    }


@dataclass(frozen=True, slots=True)
class Kind:
    """What llama.cpp calls an architecture. `settings`: those of this kind, from the keys and what is known."""

    model_type: str
    network: str
    settings: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = field(default=_gated)


KINDS: Mapping[str, Kind] = {
    "llama": Kind("llama", "LlamaForCausalLM", _llama),
    "mistral3": Kind("ministral3", "Ministral3ForCausalLM", _mistral3),
    "qwen2": Kind("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM", _qwen3),
    "gemma2": Kind("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": Kind("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "phi3": Kind("phi3", "Phi3ForCausalLM", _phi3),
    "starcoder2": Kind("starcoder2", "Starcoder2ForCausalLM", _starcoder2),
    "qwen2moe": Kind("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": Kind("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "gpt-oss": Kind("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "granite": Kind("granite", "GraniteForCausalLM", _granite),
    "lfm2": Kind("lfm2", "Lfm2ForCausalLM", gguf_states.lfm2),
    "lfm2moe": Kind("lfm2_moe", "Lfm2MoeForCausalLM", gguf_states.lfm2moe),
    "qwen35": Kind("qwen3_5_text", "Qwen3_5ForCausalLM", gguf_states.qwen35),
    "qwen35moe": Kind("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", gguf_states.qwen35moe),
    "nemotron_h": Kind("nemotron_h", "NemotronHForCausalLM", gguf_states.nemotron_h),
}
"""By `general.architecture`."""
