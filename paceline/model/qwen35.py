"""The dense layers of Qwen3.5 for native code: gated attention, and the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.model.layer_weights import (
    MATRICES,
    AnyLayerWeights,
    DecoderLayerWeights,
    DeltaLayerWeights,
    DeltaShape,
    DeltaWeights,
    LayerWeights,
    QuantizedWeight,
    Weight,
)
from paceline.model.native.native_library import LANES

MODEL_TYPE = "qwen3_5_text"
DELTA_MATRICES: Mapping[str, str] = {
    **{"mixed": "in_proj_qkv", "gate": "in_proj_z"},
    **{"beta": "in_proj_b", "decay": "in_proj_a"},
}
"""Of a layer that keeps a state, and transformers' names for them."""
DELTA_VECTORS: Mapping[str, str] = {
    **{"convolution": "conv1d.weight", "rates": "A_log"},
    **{"offsets": "dt_bias", "norm": "norm.weight"},
}
"""The rest of it; for the rates transformers has the logarithms of their magnitudes."""


def runs_natively(config: Any) -> bool:
    """Whether native code has the layers of a model with this configuration."""
    plain = getattr(config, "quantization_config", None) is None  # else its weights are transformers' own modules
    other = getattr(config, "attention_bias", False) or getattr(config, "hidden_act", "silu") != "silu"
    if config.model_type != MODEL_TYPE or not plain or other:
        return False
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    return "full_attention" in config.layer_types and not any(size % LANES for size in sizes)


def attending_layers(config: Any) -> int | None:
    """How many of such a model's layers attend; None for any other model: all."""
    return config.layer_types.count("full_attention") if config.model_type == MODEL_TYPE else None


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
    """The weights of transformers' layer."""
    if layer.block_type == "full_attention":
        return attention_layer_of(layer)
    delta = layer.linear_attn
    return DeltaLayerWeights(_delta_of(delta), output=delta.out_proj.weight, **_common_parts(layer))


def attention_layer_of(layer: Any) -> DecoderLayerWeights:
    """The weights of transformers' layer that attends, which may be that of multi-token prediction."""
    attention, parts = layer.self_attn, _common_parts(layer)
    parts["query"], parts["output_gate"] = split_gate(attention.q_proj.weight, attention.head_dim)
    return LayerWeights(**parts, query_norm=norm_of(attention.q_norm), key_norm=norm_of(attention.k_norm))


def _common_parts(layer: Any) -> dict[str, Any]:
    """Matrices that are Llama's, by name, and the norms of the layer's two halves."""
    modules = dict(layer.named_modules())
    matrices = {field: modules[name].weight for field, name in MATRICES.items() if name in modules}
    norms = {"input_norm": layer.input_layernorm, "inner_norm": layer.post_attention_layernorm}
    return {**matrices, **{field: norm_of(norm) for field, norm in norms.items()}}


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
    tensors = dict(module.named_parameters())
    matrices = {field: tensors[f"{name}.weight"] for field, name in DELTA_MATRICES.items()}
    vectors = {field: tensors[name] for field, name in DELTA_VECTORS.items()}
    vectors |= {"convolution": vectors["convolution"].squeeze(1), "rates": -vectors["rates"].float().exp()}
    return DeltaWeights(**matrices, **vectors)
