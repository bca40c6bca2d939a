"""The configuration of GGUF files of kinds whose layers keep states, in transformers' terms.

Other keys of these kinds than those that are read are refused, unless they are `HARMLESS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.gguf.gguf_keys import Keys
from paceline.gguf.gguf_rope import DEFAULT_BASE, rope, scaling

ARCHITECTURES = frozenset({"lfm2", "lfm2moe", "qwen35", "qwen35moe", "nemotron_h"})
"""llama.cpp's names of these kinds."""
BY_KV_HEADS = frozenset({"lfm2", "lfm2moe", "nemotron_h"})
"""In these, a layer with 0 heads of keys does not attend."""
HARMLESS: Mapping[str, Any] = {
    **{"vocab_size": None, "rope.scaling.finetuned": None, "rope.scaling.original_context_length": None},
    **{"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "nextn_predict_layers": 0},
}
"""Keys that change nothing if they have this value. None: whatever they have."""
SIGMOID = 2
"""llama.cpp's number of a router whose scores are sigmoids."""
FULL_ATTENTION_INTERVAL = 4
"""Every fourth layer of Qwen3.5 attends, unless the file says otherwise."""


def lfm2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Convolutions, and attention."""
    return {"block_auto_adjust_ff_dim": False, **_lfm2(keys, config)}


def lfm2moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a mixture of experts after the first layers."""
    if (router := keys.count("expert_gating_func")) != SIGMOID:
        raise keys.error("expert_gating_func", f"is {router}, and not {SIGMOID}, for sigmoids")
    return {
        **_lfm2(keys, config),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_dense_layers": keys.optional_count("leading_dense_block_count", 0),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        **{"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    }


def _lfm2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = keys.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "intermediate_size": keys.count("feed_forward_length"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope(keys, config),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in layers],
    }


def qwen35(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gated delta rule, and gated attention."""
    return {"intermediate_size": keys.count("feed_forward_length"), **_qwen35(keys, config)}


def qwen35moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a mixture of experts."""
    width = keys.count("expert_feed_forward_length")
    return {
        "intermediate_size": keys.optional_count("feed_forward_length", width),  # no layer has it
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        **_qwen35(keys, config),
    }


def _qwen35(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The last layers may be for drafting, and are not read."""
    drafting = keys.optional_count("nextn_predict_layers", 0) or 0
    size, key_heads, value_heads = (
        keys.count(f"ssm.{each}") for each in ("state_size", "group_count", "time_step_rank")
    )
    if value_heads % key_heads:
        raise keys.error("ssm.group_count", f"is {key_heads}, which does not divide ssm.time_step_rank, {value_heads}")
    if (inner := keys.count("ssm.inner_size")) != size * value_heads:
        raise keys.error("ssm.inner_size", f"is {inner}, and not {value_heads} heads of ssm.state_size, {size}")
    return {
        "num_hidden_layers": config["num_hidden_layers"] - drafting,
        **({"mtp_num_hidden_layers": drafting} if drafting else {}),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _partial_rope(keys, config),
        "layer_types": _qwen35_layers(keys, config["num_hidden_layers"])[: config["num_hidden_layers"] - drafting],
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }


def _qwen35_layers(keys: Keys, layers: int) -> list[str]:
    interval = keys.optional_count("full_attention_interval", FULL_ATTENTION_INTERVAL) or 1
    states = keys.by_layer("attention.recurrent_layers", layers) or [(n + 1) % interval for n in range(layers)]
    return ["linear_attention" if each else "full_attention" for each in states]


def _partial_rope(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of heads that are rotated in part, by one position of a text's token."""
    rotated = keys.optional_count("rope.dimension_count", config["head_dim"]) or 0
    sections = keys.counts("rope.dimension_sections")
    if len(sections) not in (0, 4):
        raise keys.error("rope.dimension_sections", f"has {len(sections)} numbers, and not 4")
    if sections and not _all_rotated(sections, rotated // 2):
        raise keys.error("rope.dimension_sections", f"is {sections}, which leaves some of {rotated // 2} pairs at 0")
    return {
        "rope_theta": keys.optional_number("rope.freq_base", DEFAULT_BASE),
        "partial_rotary_factor": rotated / config["head_dim"],
        **scaling(keys),
    }


def _all_rotated(sections: list[int], pairs: int) -> bool:
    """Whether every pair has one of a token's first three positions, which are equal in a text; the fourth is 0."""
    count = sum(sections) or 1
    return all(pair % count < 3 * sections[pair % count % 3] for pair in range(pairs))


def nemotron_h(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Mamba-2, attention without positions, and MLPs, each a layer of its own."""
    heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    groups = keys.count("ssm.group_count")
    for key, number in (("ssm.time_step_rank", heads), ("ssm.group_count", groups)):
        if inner % number:
            raise keys.error(key, f"is {number}, which does not divide ssm.inner_size, {inner}")
    for unused in ("rope.dimension_count", "rope.freq_base"):
        keys.optional_number(unused)
    layers = _nemotron_layers(keys, config["num_hidden_layers"])
    first = {kind: f"blk.{layers.index(kind)}" for kind in dict.fromkeys(layers)}
    norm = keys.optional_number("attention.layer_norm_epsilon")
    return {
        "layers_block_type": layers,
        "intermediate_size": keys.count_of_layers("feed_forward_length", zeros=True) or 0,
        "layer_norm_epsilon": keys.optional_number("attention.layer_norm_rms_epsilon", norm),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": groups,
        "ssm_state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "use_conv_bias": keys.has_tensor(f"{first.get('linear_attention')}.ssm_conv1d.bias"),
        "attention_bias": keys.has_tensor(f"{first.get('full_attention')}.attn_output.bias"),
        "mlp_bias": keys.has_tensor(f"{first.get('mlp')}.ffn_down.bias"),
    }


def _nemotron_layers(keys: Keys, layers: int) -> list[str]:
    kv_heads = keys.by_layer("attention.head_count_kv", layers) or [1] * layers
    widths = keys.by_layer("feed_forward_length", layers) or [0] * layers
    kinds = {(True, False): "full_attention", (False, True): "mlp", (False, False): "linear_attention"}
    for layer, (heads, width) in enumerate(zip(kv_heads, widths, strict=True)):
        if heads and width:
            raise keys.error("feed_forward_length", f"is {width} in layer {layer}, which attends")
    return [kinds[bool(heads), bool(width)] for heads, width in zip(kv_heads, widths, strict=True)]
