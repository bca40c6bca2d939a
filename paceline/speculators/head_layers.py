"""What heads made of decoder layers share: their own keys and values, and layers read from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.model.attention import Heads, KVCache, Pass
from paceline.model.layers import Attention, Linear, Norm, Rotary, SwiGLU, Turn, joined_head_norms
from paceline.model.lending import Lent
from paceline.model.rows import GROUP, Row, lay_out
from paceline.speculators.weights import Weights


class HeadPasses:
    """Passes of a head over rows, with keys and values in slots 1 to `slots`."""

    def __init__(self, config: Any, layers: int, slots: int, lent: Lent) -> None:
        """Positions go as far as the target's, whatever `config` says: the rotary tables are made for that."""
        self.heads = Heads.of(config)
        self._cache = KVCache(layers, slots + 1, self.heads, lent.dtype, lent.device)
        like = torch.empty(1, dtype=lent.dtype, device=lent.device)
        self._rotary = Rotary(LlamaRotaryEmbedding(config).to(lent.device), lent.max_model_len, like)

    def here(self, states: Tensor) -> Tensor:
        """The target's states in the head's dtype and on its device; they may have come over a network."""
        return states.to(self._cache.data)

    def begin(self, rows: Sequence[Row]) -> tuple[Pass, Turn]:
        batch = lay_out(rows, self._cache.device)
        return Pass.of(self._cache, batch), self._rotary(batch.positions)


def padded(features: Tensor) -> Tensor:
    """With rows of zeros up to as many as a pass has."""
    return F.pad(features, (0, 0, 0, -len(features) % GROUP))


def picked(states: Tensor, wanted: Sequence[int]) -> Tensor:
    """These rows [wanted, h]."""
    return states.index_select(0, torch.tensor(wanted, device=states.device, dtype=torch.int64))


class HeadLayer:
    """A decoder layer of the Llama kind. The first layer of a head has other inputs, and may have no norm before it."""

    def __init__(self, weights: Weights, index: int, config: Any, heads: Heads) -> None:
        name, h, eps = f"layers.{index}", int(config.hidden_size), float(config.rms_norm_eps)
        before = weights.maybe(f"{name}.input_layernorm.weight", h)
        self._before = None if before is None else Norm(before, eps)
        self._attention = attention_of(weights, index, config, heads, h)
        self._after = mlp_of(weights, index, config)

    def __call__(self, x: Tensor, turn: Turn, this: Pass) -> Tensor:
        x = x + self._attention(x if self._before is None else self._before(x), turn, this)
        return self._after(x)


class _NormedMlp:
    """`x + mlp(norm(x))`."""

    def __init__(self, norm: Norm, mlp: SwiGLU) -> None:
        self._norm, self._mlp = norm, mlp

    def __call__(self, x: Tensor) -> Tensor:
        return x + self._mlp(self._norm(x))


def attention_of(weights: Weights, index: int, config: Any, heads: Heads, width: int) -> Attention:
    """Attention of layer `index`, over inputs of `width`. Biases and head norms are there if their tensors are."""
    name, h = f"layers.{index}.self_attn", int(config.hidden_size)
    queries = heads.kv_heads * heads.queries_per_kv * heads.head_size
    keys = heads.kv_heads * heads.head_size
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    biased = any(f"{name}.{each}.bias" in weights for each in sizes)
    biases = [weights.take(f"{name}.{each}.bias", n) for each, n in sizes.items()] if biased else []
    out_bias = weights.maybe(f"{name}.o_proj.bias", h)
    query_norm = weights.maybe(f"{name}.q_norm.weight", heads.head_size)
    norms = None
    if query_norm is not None:
        key_norm = weights.take(f"{name}.k_norm.weight", heads.head_size)
        norms = joined_head_norms(heads, query_norm, key_norm, float(config.rms_norm_eps))
    return Attention(
        index,
        heads,
        Linear(*(weights.take(f"{name}.{each}.weight", n, width) for each, n in sizes.items()), biases=biases),
        Linear(weights.take(f"{name}.o_proj.weight", h, queries), biases=[] if out_bias is None else [out_bias]),
        scale=heads.head_size**-0.5,
        head_norms=norms,
    )


def mlp_of(weights: Weights, index: int, config: Any) -> _NormedMlp:
    """The second half of layer `index`, its norm and residual included."""
    name, h, inner = f"layers.{index}", int(config.hidden_size), int(config.intermediate_size)
    norm = Norm(weights.take(f"{name}.post_attention_layernorm.weight", h), float(config.rms_norm_eps))
    gate, up = (weights.take(f"{name}.mlp.{each}_proj.weight", inner, h) for each in ("gate", "up"))
    return _NormedMlp(norm, SwiGLU(Linear(gate, up), Linear(weights.take(f"{name}.mlp.down_proj.weight", h, inner))))
