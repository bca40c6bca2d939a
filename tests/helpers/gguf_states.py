"""The layout of GGUF files of kinds whose layers keep states, for `tests.helpers.gguf_files`.

Names, types, shapes and bytes of all tensors were compared with what `convert_hf_to_gguf.py` of llama.cpp b11434 writes
for the same network, in float32 and in bfloat16, and so were the keys of a kind. They differ in the shape of
`ffn_gate_inp_shexp` ([64], there [1, 64]), in a size of heads that tiny `lfm2` name here, and in `nemotron_h`'s
`context_length`, which is 2^20 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

STATE_ARCHITECTURES: Mapping[str, str] = {
    **{
        "lfm2": "lfm2",
        "lfm2_moe": "lfm2moe",
        "qwen3_5_text": "qwen35",
        "qwen3_5_moe_text": "qwen35moe",
        "nemotron_h": "nemotron_h",
    }
}
"""llama.cpp's names of transformers' model types."""
STATE_KINDS: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {
        **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
        **{"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    },
    "lfm2_moe": {
        **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True},
    },
    "qwen3_5_text": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 32},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "qwen3_5_moe_text": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    },
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 32},
    },
}
"""What tiny configurations have beside `gguf_files.BASE`."""
MIXTURES = ("qwen3_5_moe_text",)
QWEN35 = ("qwen3_5_text", *MIXTURES)
FLOATS = ("conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
"""Ends of the names of matrices that are never quantised."""


def converted_name(name: str) -> str:
    """A parameter's name as the converter looks it up in the tables of `gguf`."""
    if ".mixer." in name or name.startswith(("model.embeddings", "model.norm_f")) or name.endswith(".norm.weight"):
        name = name if "linear_attn" in name or name == "model.norm.weight" else name.replace("model.", "backbone.", 1)
    return name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")


def add_state_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """All keys of such a kind."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    {"lfm2": _add_lfm2, "lfm2_moe": _add_lfm2, "nemotron_h": _add_nemotron}.get(config.model_type, _add_qwen35)(
        writer, config
    )


def _add_lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_qwen35(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type in MIXTURES:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    states = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{STATE_ARCHITECTURES[config.model_type]}.attention.recurrent_layers", states)
    writer.add_full_attention_interval(4)


def _add_nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length([config.intermediate_size * (kind == "mlp") for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)


def state_shape(name: str, tensor: Tensor, config: Any) -> tuple[int, ...]:
    """The file's shape of a tensor of this name."""
    if name.endswith(("conv1d.weight", "shortconv.conv.weight")):
        return len(tensor), tensor.shape[-1]
    if config.model_type == "nemotron_h":
        if name.endswith(("ssm_a", "ssm_d")):
            return len(tensor), 1
        if name.endswith("ssm_norm.weight"):
            return config.n_groups, len(tensor) // config.n_groups
    return tuple(tensor.shape)


def is_plus_one(name: str, config: Any) -> bool:
    """Whether the file adds one to this norm."""
    return config.model_type in QWEN35 and name.endswith("norm.weight") and "ssm_norm" not in name


def tiled_rows(name: str, tensor: Tensor, config: Any) -> Tensor | None:
    """The order of a tensor's rows in the file, None if it is transformers'.

    ggml repeats key heads as 0, 1, 0, 1, and transformers as 0, 0, 1, 1: so value heads are reordered.
    """
    ends = ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight")
    if config.model_type not in QWEN35 or not name.endswith((*ends, "ssm_a", "ssm_dt.bias")):
        return None
    count = len(tensor)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = 1 if count == values else config.linear_value_head_dim
    first = list(range(count - values * size))
    heads = [key * (values // keys) + n for n in range(values // keys) for key in range(keys)]
    return torch.tensor(first + [len(first) + head * size + row for head in heads for row in range(size)])


def tiled_columns(name: str, tensor: Tensor, config: Any) -> Tensor:
    """A view of an output matrix whose columns are in the order of the file; others as they are."""
    if config.model_type not in QWEN35 or not name.endswith("ssm_out.weight"):
        return tensor
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    return tensor.unflatten(1, (keys, -1, size)).transpose(1, 2)
