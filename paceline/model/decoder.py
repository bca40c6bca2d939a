"""A causal language model as a function of rows: tokens and positions in, logits out.

Two ways to run a transformers model, with one face. `LayeredDecoder` calls the model as it is, whatever its
architecture. `LlamaDecoder` runs layers of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...) from the same
weights: on a CPU as one native call for each pass, elsewhere with few operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.model.attention import ATTENTION, Heads, KVCache
from paceline.model.layers import Linear
from paceline.model.llama import Layer, RotaryTables
from paceline.model.native.attention import NativeAttention
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.network import Network as NativeNetwork
from paceline.model.network import Network, make_attention, make_network
from paceline.model.products import piecewise
from paceline.model.rows import GROUP, SPARE_SLOT, Lane, Row

if TYPE_CHECKING:  # which a model of one process need not load
    from paceline.model.sharding import Sharding


class Decoder(Protocol):
    """Runs a model over rows, with a KV cache of its own."""

    cache: KVCache

    @property
    def native(self) -> bool:
        """Whether passes are native code."""

    @property
    def attends_natively(self) -> bool:
        """Whether attention is."""

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [wanted, vocabulary] of the rows in `wanted`; and if `layers` names some, their outputs for all rows,
        [rows, layers, hidden size]: 0 is the embedding, n the output of layer n, and what comes after the last layer is
        the output of the final norm.
        """

    def embedding(self) -> Tensor:
        """What the first layer sees of each token, [vocabulary, hidden size]."""

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

    native = False

    def __init__(self, model: Any, heads: Heads, slots: int, sharding: Sharding | None = None) -> None:
        """`sharding`: how ranks share the model, if they do."""
        model.set_attn_implementation(ATTENTION)
        piecewise(model)
        _route_row_by_row(model)
        if sharding is not None:
            sharding.complete(model)
        weight = model.get_output_embeddings().weight
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._attention, self.cache = make_attention(layers, heads, slots, weight)
        self._model = model
        base: Any = self._model.base_model
        self._embedding: Any = base.get_input_embeddings()
        self._head: nn.Module = self._model.get_output_embeddings()
        self._taps: list[nn.Module] = [self._embedding, *base.layers, base]

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        this = self._attention(rows)
        kept: dict[int, Tensor] = {}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in set(layers)]
        try:
            logits = self._model(
                input_ids=this.tokens.unsqueeze(0),
                position_ids=this.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=padded(wanted, self.cache.device),
                paceline_pass=this,
            ).logits[0, : len(wanted)]
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack([kept[n][: len(rows)] for n in layers], 1) if layers else None

    @property
    def attends_natively(self) -> bool:
        return isinstance(self._attention, NativeAttention)

    def embedding(self) -> Tensor:
        """The model's own, or a copy where the model does more than look it up: some scale it."""
        weight: Tensor = self._embedding.weight.detach()
        if type(self._embedding) is nn.Embedding:
            return weight
        with torch.inference_mode():
            scaled: Tensor = self._embedding(torch.arange(len(weight), device=weight.device))
        return scaled

    def output(self, final: Tensor) -> Tensor:
        logits: Tensor = self._head(final)
        return logits


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = (output if isinstance(output, Tensor) else output[0])[0]  # the whole model's output is a mapping, too

    return hook


def padded(wanted: Sequence[int], device: torch.device) -> Tensor:
    """As many places of rows as a product takes: int64, a multiple of GROUP of them."""
    padding = -len(wanted) % GROUP if wanted else GROUP
    return torch.tensor([*wanted, *[0] * padding], device=device)


class LlamaDecoder:
    """Layers of the Llama kind, see `paceline.model.network`.

    With ranks, weights and heads are one rank's: of every product but those that end attention and network, and the
    last of all, its rows; of those two its columns. All of this kind are shared so.
    """

    def __init__(self, model: nn.Module, heads: Heads, slots: int, positions: int, sharding: Sharding | None) -> None:
        base: Any = model.base_model
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        ranks = None if sharding is None else sharding.ranks
        self._embedding: Tensor = base.embed_tokens.weight
        self._final = len(base.layers) + 1
        self._gathered: Callable[[Tensor], Tensor] | None = None
        if ranks is not None:  # each may have a part of the vocabulary
            part, width = Linear(head.weight), head.out_features
            whole = len(head.weight) == width
            self._gathered = part if whole else lambda x: ranks.gather(part(x), width)
        self._network, self.cache = make_network(
            [layer_of(layer) for layer in base.layers],
            heads,
            slots,
            RotaryTables.of(base.rotary_emb, positions),
            partial(_compare, model) if ranks is None else None,
            hidden=self._embedding.shape[1],
            eps=float(base.norm.variance_epsilon),
            scale=float(base.layers[0].self_attn.scaling),
            embedding=self._embedding,
            norm=base.norm.weight,
            head=head.weight if ranks is None else None,
            sums=None if ranks is None else ranks.sum,
        )

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        if self._gathered is None:
            return self._network.run(rows, wanted, layers)
        _, states = self._network.run(rows, [], [*layers, self._final])
        assert states is not None
        logits = self._gathered(states[padded(wanted, states.device), -1])[: len(wanted)]
        return logits, states[:, :-1] if layers else None

    @property
    def native(self) -> bool:
        return isinstance(self._network, NativeNetwork)

    attends_natively = native

    def embedding(self) -> Tensor:
        return self._embedding

    def output(self, final: Tensor) -> Tensor:
        return self._network.output(final)


def layer_of(layer: Any) -> Layer:
    """What transformers' layer of the Llama kind is made of."""
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    products: dict[str, Any] = {
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
        "output": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    norms = {  # Qwen3 norms every query and key head
        "input_norm": layer.input_layernorm,
        "inner_norm": layer.post_attention_layernorm,
        "query_norm": getattr(attention, "q_norm", None),
        "key_norm": getattr(attention, "k_norm", None),
    }
    tensors: dict[str, Any] = {name: module.weight for name, module in products.items()}
    tensors |= {f"{name}_bias": module.bias for name, module in products.items()}
    tensors |= {name: None if module is None else module.weight for name, module in norms.items()}
    return Layer(**tensors, window=int(window or 0))


LLAMA_KIND = frozenset({"llama", "mimo", "mistral", "qwen2", "qwen3"})
"""`config.model_type` of architectures whose layers are exactly of the Llama kind, with options that `Layer` has."""
SAMPLE = 24
"""Tokens that a native model is compared with transformers' own by."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of logits between the two, relative to the largest logit. In bf16 transformers' own are off by
several hundredths; a mistake shows by whole units."""


def is_llama_kind(config: Any) -> bool:
    """Whether a model of this configuration has layers of the Llama kind only."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_KIND
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
    )


def make_decoder(
    model: nn.Module, heads: Heads, slots: int, positions: int, sharding: Sharding | None = None
) -> Decoder:
    """The fastest decoder that computes this model, over a cache of so many slots and a spare one.

    `sharding`: as ranks share it, if they do.
    """
    if is_llama_kind(model.config):
        return LlamaDecoder(model, heads, slots + 1 + SPARE_SLOT, positions, sharding)
    return LayeredDecoder(model, heads, slots + 1 + SPARE_SLOT, sharding)


@torch.inference_mode()
def _compare(model: nn.Module, network: Network) -> None:
    """Raises `NativeUnavailableError` unless the logits of a few tokens are those of transformers' own forward."""
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    tokens = [(7 * i + 3) % len(weight) for i in range(SAMPLE)]
    lane = Lane(range(1, SAMPLE + 1))
    ours, _ = network.run([lane.row(token, i) for i, token in enumerate(tokens)], range(SAMPLE))
    theirs = model(torch.tensor([tokens])).logits[0].float()
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    if not off <= TOLERANCE[weight.dtype]:
        raise NativeUnavailableError(f"its logits are off by {off:.2g} of the largest")
