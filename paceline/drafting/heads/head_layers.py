"""What heads made of decoder layers share: layers of the Llama kind, over keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.heads.head_network import HeadOutput
from paceline.drafting.heads.head_vocabulary import OutputProjection
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.attention import Heads
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables, StateFusion
from paceline.model.network_factory import make_network
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


class HeadLayers:
    """A head from tokens and features to logits, as one pass. Keys and values are in slots 1 to `slots`."""

    def __init__(
        self,
        layers: Sequence[DecoderLayerWeights],
        config: Any,
        slots: int,
        lent: TargetWeights,
        *,
        fusion: StateFusion,
        embedding: Tensor,
        norm: Tensor | None,
        output: OutputProjection,
        rotary: nn.Module | None = None,
        feeds_back_normed: bool = False,
    ) -> None:
        """`norm`: before the output, if there is one. `rotary`: transformers' module; None: a Llama's.
        `feeds_back_normed`: features are what the norm gives, and not the last layer.

        Positions go as far as the target's, whatever `config` says: the rotary tables are made for that.
        """
        heads = Heads.of(config)
        rotary = rotary or LlamaRotaryEmbedding(config)
        own = isinstance(output, Tensor)
        self._network, self._cache = make_network(
            layers,
            heads,
            slots + 1,
            RotaryTables.of(rotary.to(lent.device), lent.max_model_len),
            hidden=int(config.hidden_size),
            eps=float(config.rms_norm_eps),
            scale=heads.head_size**-0.5,
            embedding=embedding,
            norm=norm,
            head=output if own else None,
            fusion=fusion,
        )
        self._target_output = None if isinstance(output, Tensor) else output
        fed_back = len(layers) + feeds_back_normed
        self._taps = (fed_back,) if own else (fed_back, len(layers) + 1)

    def to_device(self, states: Tensor) -> Tensor:
        """The target's states in the head's dtype and on its device; they may have come over a network."""
        return states.to(self._cache.data)

    def __call__(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        """`features` [rows, h]."""
        logits, outputs = self._network.run(rows, wanted, self._taps, states=features)
        assert outputs is not None
        if list(wanted) != list(range(len(rows))):
            outputs = outputs[list(wanted)]
        if self._target_output is not None:
            logits = self._target_output(outputs[:, 1])
        return HeadOutput(logits, outputs[:, 0])


def llama_layers(weights: HeadWeights, config: Any, first_width: int) -> list[DecoderLayerWeights]:
    """Layers by the names of a Llama's tensors. `first_width`: of what the first layer's attention multiplies."""
    heads = Heads.of(config)
    widths = [first_width, *[int(config.hidden_size)] * (int(config.num_hidden_layers) - 1)]
    return [_layer(weights, n, config, heads, width) for n, width in enumerate(widths)]


def _layer(weights: HeadWeights, index: int, config: Any, heads: Heads, width: int) -> DecoderLayerWeights:
    """Layer `index`. Biases and norms of heads are there if their tensors are. A first layer may have no norm."""
    name, h, inner = f"layers.{index}", int(config.hidden_size), int(config.intermediate_size)
    attention = f"{name}.self_attn"
    queries = heads.kv_heads * heads.queries_per_kv * heads.head_size
    keys = heads.kv_heads * heads.head_size
    sizes = {"query": queries, "key": keys, "value": keys}
    query_norm = weights.take_optional(f"{attention}.q_norm.weight", heads.head_size)
    biased = any(f"{attention}.{each[0]}_proj.bias" in weights for each in sizes)
    tensors: dict[str, Any] = {}
    for each, size in sizes.items():
        tensors[each] = weights.take(f"{attention}.{each[0]}_proj.weight", size, width)
        if biased:
            tensors[f"{each}_bias"] = weights.take(f"{attention}.{each[0]}_proj.bias", size)
    return DecoderLayerWeights(
        **tensors,
        output=weights.take(f"{attention}.o_proj.weight", h, queries),
        output_bias=weights.take_optional(f"{attention}.o_proj.bias", h),
        query_norm=query_norm,
        key_norm=None if query_norm is None else weights.take(f"{attention}.k_norm.weight", heads.head_size),
        input_norm=weights.take_optional(f"{name}.input_layernorm.weight", h) if width == h else None,
        inner_norm=weights.take(f"{name}.post_attention_layernorm.weight", h),
        gate=weights.take(f"{name}.mlp.gate_proj.weight", inner, h),
        up=weights.take(f"{name}.mlp.up_proj.weight", inner, h),
        down=weights.take(f"{name}.mlp.down_proj.weight", h, inner),
    )
