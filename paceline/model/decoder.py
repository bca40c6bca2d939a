"""A causal language model as a function of rows: tokens and positions in, logits out.

Two ways to run a transformers model, with one face. `LayeredDecoder` calls the model as it is, whatever its
architecture. `FusedDecoder` runs layers of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...) from the same
weights with fewer operators: on a CPU and for small models it is the operators per layer that cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Heads, Pass, attend
from paceline.model.rows import GROUP


class Decoder(Protocol):
    """Runs a model over rows."""

    def __call__(self, this: Pass, wanted: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows in `wanted` (int64, a multiple of GROUP of them: a product's result may depend on
        it), [wanted, vocabulary]; and if `layers` names some, their outputs for all rows, [R, layers, hidden
        size]: 0 is the embedding, n the output of layer n, before any final norm.
        """


class LayeredDecoder:
    """Any transformers causal language model, through its own forward and `attention_interface`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        base: Any = self._model.base_model
        self._taps: list[nn.Module] = [base.get_input_embeddings(), *base.layers]

    def __call__(self, this: Pass, wanted: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        kept: dict[int, Tensor] = {}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in set(layers)]
        try:
            logits = self._model(
                input_ids=this.batch.tokens.unsqueeze(0),
                position_ids=this.batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=wanted,
                paceline_pass=this,
            ).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack([kept[n] for n in layers], 1) if layers else None


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


class FusedDecoder:
    """Layers of the Llama kind in few operators: joined projections, one-operator norms, rotary tables."""

    def __init__(self, model: nn.Module, heads: Heads, positions: int) -> None:
        base: Any = model.base_model
        self._embedding: Tensor = base.embed_tokens.weight
        self._head = _Linear(model.get_output_embeddings())  # type: ignore[operator]
        self._norm = _Norm(base.norm)
        self._layers = [_FusedLayer(n, layer, heads) for n, layer in enumerate(base.layers)]
        like = self._embedding.new_empty(1)
        cos, sin = base.rotary_emb(like, torch.arange(positions, device=like.device).unsqueeze(0))
        half = heads.head_size // 2
        # [positions, 1, D]: x * cos + swap_halves(x) * sin rotates, with the sign of the first half in the table.
        self._cos = cos[0].unsqueeze(1)
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)

    def __call__(self, this: Pass, wanted: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        batch = this.batch
        state = F.embedding(batch.tokens, self._embedding)
        rotary = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        outputs = [state]
        for layer in self._layers:
            state = layer(state, rotary, this)
            outputs.append(state)
        final = self._norm(state.index_select(0, wanted))
        return self._head(final), torch.stack([outputs[n] for n in layers], 1) if layers else None


class _Norm:
    """RMSNorm as one operator."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._eps = float(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class _Linear:
    """One product for several projections of the same input.

    On a CPU the weight is laid out once for oneDNN, as torch's own compiler does. In bf16 the result is the same bit
    for bit; in fp32 it, too, does not depend on the number of rows, nor on where the weight lies in memory.
    """

    def __init__(self, *linears: Any) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        self._bias: Tensor | None = None if linears[0].bias is None else torch.cat([x.bias for x in linears])
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, GROUP) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)


class _FusedLayer:
    def __init__(self, index: int, layer: Any, heads: Heads) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._heads = index, heads
        self._scale = float(attention.scaling)
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self._window = int(window or 0)
        self._into_attention, self._into_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qkv = _Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = _Linear(attention.o_proj)
        self._gate_up = _Linear(mlp.gate_proj, mlp.up_proj)
        self._down = _Linear(mlp.down_proj)
        self._head_norms = _head_norms(attention, heads)

    def __call__(self, state: Tensor, rotary: tuple[Tensor, Tensor], this: Pass) -> Tensor:
        attended = self._attend(self._into_attention(state), rotary, this)
        state = state + self._out(attended)
        gate, up = self._gate_up(self._into_mlp(state)).chunk(2, -1)
        return state + self._down(F.silu(gate) * up)

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], this: Pass) -> Tensor:
        heads = self._heads
        queries = heads.kv_heads * heads.queries_per_kv
        rotated = queries + heads.kv_heads
        projected = self._qkv(x).view(x.shape[0], rotated + heads.kv_heads, heads.head_size)
        qk = projected[:, :rotated]
        if self._head_norms is not None:
            weight, eps = self._head_norms
            qk = F.rms_norm(qk, (heads.head_size,), None, eps) * weight
        cos, sin = rotary
        qk = torch.addcmul(qk * cos, qk.roll(heads.head_size // 2, -1), sin)
        return attend(
            qk[:, :queries], qk[:, queries:], projected[:, rotated:], self._index, this, self._scale, self._window
        )


def _head_norms(attention: Any, heads: Heads) -> tuple[Tensor, float] | None:
    """Qwen3 normalises every query and key head: weights [query heads + key heads, D]."""
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return None
    queries = heads.kv_heads * heads.queries_per_kv
    weight = torch.cat([norm.weight.expand(queries, -1), attention.k_norm.weight.expand(heads.kv_heads, -1)])
    return weight, float(norm.variance_epsilon)


FUSED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`config.model_type` of architectures whose layers are exactly of the Llama kind, with options fused here."""


def can_fuse(model: nn.Module) -> bool:
    """Whether `FusedDecoder` computes what this model computes."""
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FUSED_TYPES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
    )


def make_decoder(model: nn.Module, heads: Heads, positions: int) -> Decoder:
    """The decoder with the fewest operators that computes this model."""
    return FusedDecoder(model, heads, positions) if can_fuse(model) else LayeredDecoder(model)
