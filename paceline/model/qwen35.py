"""The dense layers of Qwen3.5 for native code: gated attention, and the gated delta rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.model.layer_weights import (
    MATRICES,
    AnyLayerWeights,
    DeltaLayerWeights,
    DeltaShape,
    DeltaWeights,
    LayerWeights,
    QuantizedWeight,
    Weight,
)
from paceline.model.native.native_library import LANES

MODEL_TYPE = "qwen3_5_text"


def runs_natively(config: Any) -> bool:
    """Whether native code has the layers of a model with this configuration."""
    plain = getattr(config, "quantization_config", None) is None  # else its weights are transformers' own modules
    if config.model_type != MODEL_TYPE or not plain or config.hidden_act != "silu" or config.attention_bias:
        return False
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    return "full_attention" in config.layer_types and not any(size % LANES for size in sizes)


def delta_shape(config: Any) -> DeltaShape:
    """Of the layers of such a model that keep a state."""
    return DeltaShape(
        config.linear_num_value_heads,
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def layer_of(layer: Any) -> AnyLayerWeights:
    """The weights of transformers' layer, which may be that of multi-token prediction."""
    modules = dict(layer.named_modules())
    matrices: dict[str, Any] = {field: modules[name].weight for field, name in MATRICES.items() if name in modules}
    norms: dict[str, Any] = {
        "input_norm": norm_of(layer.input_layernorm),
        "inner_norm": norm_of(layer.post_attention_layernorm),
    }
    if "linear_attn" in modules:
        delta = layer.linear_attn
        return DeltaLayerWeights(_delta_of(delta), output=delta.out_proj.weight, **matrices, **norms)
    attention = layer.self_attn
    matrices["query"], gate = split_gate(attention.q_proj.weight, attention.head_dim)
    norms |= {"query_norm": norm_of(attention.q_norm), "key_norm": norm_of(attention.k_norm)}
    return LayerWeights(**matrices, **norms, output_gate=gate)


def norm_of(norm: Any) -> Tensor:
    """What transformers' norm multiplies by, float32: it stores the difference from 1."""
    weight: Tensor = 1.0 + norm.weight.detach().float()
    return weight


def split_gate(queries: Weight, size: int) -> tuple[Weight, Weight]:
    """Queries, and the gates of what they attend to: of each head, rows of the former precede those of the latter."""
    numbers: Any = queries.data if isinstance(queries, QuantizedWeight) else queries.detach()
    halves = numbers.reshape(-1, 2, size, numbers.shape[-1])
    parts = (halves[:, n].reshape(-1, numbers.shape[-1]) for n in range(2))
    if isinstance(queries, QuantizedWeight):
        query, gate = (QuantizedWeight(queries.type, (len(each), queries.shape[1]), each) for each in parts)
        return query, gate
    query, gate = parts
    return query, gate


def _delta_of(module: Any) -> DeltaWeights[Tensor]:
    return DeltaWeights(
        mixed=module.in_proj_qkv.weight,
        gate=module.in_proj_z.weight,
        beta=module.in_proj_b.weight,
        decay=module.in_proj_a.weight,
        convolution=module.conv1d.weight.squeeze(1),
        rates=-module.A_log.float().exp(),
        offsets=module.dt_bias,
        norm=module.norm.weight,
    )
