"""What heads made of decoder layers share: layers read from a checkpoint, over keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.model.attention import Heads
from paceline.model.lending import Lent
from paceline.model.llama import Layer, RotaryTables
from paceline.model.network import make_network
from paceline.model.rows import Row
from paceline.speculators.weights import Weights


class HeadLayers:
    """The layers of a head and the norm after them, if it has one. Keys and values are in slots 1 to `slots`."""

    def __init__(
        self,
        weights: Weights,
        config: Any,
        slots: int,
        lent: Lent,
        *,
        norm: Tensor | None = None,
        first_width: int | None = None,
    ) -> None:
        """`first_width`: of what the first layer's attention is given, if that is not its norm of the states.

        Positions go as far as the target's, whatever `config` says: the rotary tables are made for that.
        """
        heads, h, count = Heads.of(config), int(config.hidden_size), int(config.num_hidden_layers)
        layers = [_layer(weights, n, config, heads, first_width if n == 0 else None) for n in range(count)]
        self._network, self._cache = make_network(
            layers,
            heads,
            slots + 1,
            RotaryTables.of(LlamaRotaryEmbedding(config).to(lent.device), lent.max_model_len),
            hidden=h,
            eps=float(config.rms_norm_eps),
            scale=heads.head_size**-0.5,
            norm=norm,
        )
        self._outputs = (count, count + 1)

    def here(self, states: Tensor) -> Tensor:
        """The target's states in the head's dtype and on its device; they may have come over a network."""
        return states.to(self._cache.data)

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], states: Tensor, first_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the last layer and of the norm, both [wanted, h]. `states` [rows, h] go into the first layer."""
        _, outputs = self._network.run(rows, (), self._outputs, states=states, first_input=first_input)
        assert outputs is not None
        last, final = outputs.index_select(0, torch.tensor(wanted, device=outputs.device, dtype=torch.int64)).unbind(1)
        return last, final


def _layer(weights: Weights, index: int, config: Any, heads: Heads, first_width: int | None) -> Layer:
    """Layer `index`. Biases and norms of heads are there if their tensors are. A first layer may have no norm."""
    name, h, inner = f"layers.{index}", int(config.hidden_size), int(config.intermediate_size)
    attention, width = f"{name}.self_attn", first_width or h
    queries = heads.kv_heads * heads.queries_per_kv * heads.head_size
    keys = heads.kv_heads * heads.head_size
    sizes = {"query": queries, "key": keys, "value": keys}
    query_norm = weights.maybe(f"{attention}.q_norm.weight", heads.head_size)
    biased = any(f"{attention}.{each[0]}_proj.bias" in weights for each in sizes)
    tensors: dict[str, Any] = {}
    for each, size in sizes.items():
        tensors[each] = weights.take(f"{attention}.{each[0]}_proj.weight", size, width)
        if biased:
            tensors[f"{each}_bias"] = weights.take(f"{attention}.{each[0]}_proj.bias", size)
    return Layer(
        **tensors,
        output=weights.take(f"{attention}.o_proj.weight", h, queries),
        output_bias=weights.maybe(f"{attention}.o_proj.bias", h),
        query_norm=query_norm,
        key_norm=None if query_norm is None else weights.take(f"{attention}.k_norm.weight", heads.head_size),
        input_norm=None if first_width else weights.maybe(f"{name}.input_layernorm.weight", h),
        inner_norm=weights.take(f"{name}.post_attention_layernorm.weight", h),
        gate=weights.take(f"{name}.mlp.gate_proj.weight", inner, h),
        up=weights.take(f"{name}.mlp.up_proj.weight", inner, h),
        down=weights.take(f"{name}.mlp.down_proj.weight", h, inner),
    )


def tokens_of(rows: Sequence[Row], like: Tensor) -> Tensor:
    """int64 [rows], on the device of `like`."""
    return torch.tensor([row.token for row in rows], device=like.device)
