"""A causal language model as a function of rows: tokens and positions in, logits out.

Two ways to run a transformers model, with one face. `LayeredDecoder` calls the model as it is, whatever its
architecture. `FusedDecoder` runs layers of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...) from the same
weights with fewer operators: on a CPU and for small models it is the operators per layer that cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Heads, Pass
from paceline.model.layers import Attention, Linear, Norm, Product, Rotary, SwiGLU, Turn, joined_head_norms
from paceline.model.products import piecewise

if TYPE_CHECKING:  # which a model of one process need not load
    from paceline.model.sharding import Sharding
    from paceline.tensor_parallel.ranks import Ranks


class Decoder(Protocol):
    """Runs a model over rows."""

    def __call__(self, this: Pass, wanted: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows in `wanted` (int64, a multiple of GROUP of them: a product's result may depend on
        it), [wanted, vocabulary]; and if `layers` names some, their outputs for all rows, [R, layers, hidden
        size]: 0 is the embedding, n the output of layer n, and what comes after the last layer is the output of the
        final norm.
        """

    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer sees of tokens: int64 [n] → [n, hidden size]."""

    def output(self, final: Tensor) -> Tensor:
        """Logits [n, vocabulary] of what comes out of the final norm, [n, hidden size]."""


def _route_row_by_row(model: Any) -> None:
    """Let experts multiply each of their rows by itself, where a product depends on how many there are.

    In float32 on a CPU it does: on some from the second row on, on others from the fourth. How many rows an expert has
    depends on the company that a row is in.
    """
    if model.dtype == torch.float32 and model.device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")


class LayeredDecoder:
    """Any transformers causal language model, through its own forward and `attention_interface`."""

    def __init__(self, model: Any, sharding: Sharding | None = None) -> None:
        """`sharding`: how ranks share the model, if they do."""
        piecewise(model)
        _route_row_by_row(model)
        if sharding is not None:
            sharding.complete(model)
        self._model = model
        base: Any = self._model.base_model
        self._embedding: nn.Module = base.get_input_embeddings()
        self._head: nn.Module = self._model.get_output_embeddings()
        self._taps: list[nn.Module] = [self._embedding, *base.layers, base]

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

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(ids)
        return embedded

    def output(self, final: Tensor) -> Tensor:
        logits: Tensor = self._head(final)
        return logits


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = (output if isinstance(output, Tensor) else output[0])[0]  # the whole model's output is a mapping, too

    return hook


class FusedDecoder:
    """Layers of the Llama kind in few operators, see `paceline.model.layers`.

    With `ranks`, weights and heads are one rank's: of every product but those that end attention and network, and the
    last of all, its rows; of those two its columns. All of this kind are shared so.
    """

    def __init__(self, model: nn.Module, heads: Heads, positions: int, ranks: Ranks | None = None) -> None:
        base: Any = model.base_model
        self._embedding: Tensor = base.embed_tokens.weight
        self._head = _whole(model.get_output_embeddings(), ranks)  # type: ignore[operator]
        self._norm = _norm(base.norm)
        self._layers = [_FusedLayer(n, layer, heads, ranks) for n, layer in enumerate(base.layers)]
        self._rotary = Rotary(base.rotary_emb, positions, self._embedding.new_empty(1))

    def __call__(self, this: Pass, wanted: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        batch = this.batch
        state = self.embed(batch.tokens)
        turn = self._rotary(batch.positions)
        outputs = [state]
        for layer in self._layers:
            state = layer(state, turn, this)
            outputs.append(state)
        if len(outputs) in layers:
            outputs.append(self._norm(state))
            final = outputs[-1].index_select(0, wanted)
        else:
            final = self._norm(state.index_select(0, wanted))
        return self.output(final), torch.stack([outputs[n] for n in layers], 1) if layers else None

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embedding)

    def output(self, final: Tensor) -> Tensor:
        return self._head(final)


class _FusedLayer:
    def __init__(self, index: int, layer: Any, heads: Heads, ranks: Ranks | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self._into_attention, self._into_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._attention = Attention(
            index,
            heads,
            Linear.of(attention.q_proj, attention.k_proj, attention.v_proj),
            _total(attention.o_proj, ranks),
            scale=float(attention.scaling),
            window=int(window or 0),
            head_norms=_head_norms(attention, heads),
        )
        self._mlp = SwiGLU(Linear.of(mlp.gate_proj, mlp.up_proj), _total(mlp.down_proj, ranks))

    def __call__(self, state: Tensor, turn: Turn, this: Pass) -> Tensor:
        state = state + self._attention(self._into_attention(state), turn, this)
        return state + self._mlp(self._into_mlp(state))


def _total(module: Any, ranks: Ranks | None) -> Product:
    """A product of which every rank computes a summand."""
    if ranks is None:
        return Linear.of(module)
    part, bias, add_up = Linear(module.weight), module.bias, ranks.sum
    return lambda x: add_up(part(x)) if bias is None else add_up(part(x)) + bias


def _whole(module: Any, ranks: Ranks | None) -> Product:
    """A product of which every rank may compute some columns."""
    product, width = Linear.of(module), module.out_features
    if ranks is None or len(module.weight) == width:
        return product
    gather = ranks.gather
    return lambda x: gather(product(x), width)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _head_norms(attention: Any, heads: Heads) -> tuple[Tensor, float] | None:
    """Qwen3 normalises every query and key head."""
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return None
    return joined_head_norms(heads, norm.weight, attention.k_norm.weight, float(norm.variance_epsilon))


FUSED_TYPES = frozenset({"llama", "mimo", "mistral", "qwen2", "qwen3"})
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


def make_decoder(model: nn.Module, heads: Heads, positions: int, sharding: Sharding | None = None) -> Decoder:
    """The decoder with the fewest operators that computes this model. `sharding`: as ranks share it, if they do."""
    if can_fuse(model):
        return FusedDecoder(model, heads, positions, None if sharding is None else sharding.ranks)
    return LayeredDecoder(model, sharding)
