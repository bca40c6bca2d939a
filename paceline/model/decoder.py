"""A causal language model as a function of rows: tokens and positions in, logits out.

Two ways to run a transformers model, with one face. `TransformersDecoder` calls the model as it is, whatever its
architecture. `LlamaDecoder` runs layers of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM, ...) from the same
weights: on a CPU as one native call for each pass, elsewhere with few operators.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.model.attention import ATTENTION, Heads, KVCache, Pass, use_pass
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables
from paceline.model.layers import Linear
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_network import NativeNetwork as NativeNetwork
from paceline.model.network_factory import Network, make_attention, make_network
from paceline.model.row_invariant_linear import use_chunked_linear
from paceline.model.rows import GROUP, Row, SlotTable

if TYPE_CHECKING:  # which a model of one process need not load
    from paceline.model.parallel.sharding import Sharding


class Decoder(Protocol):
    """Runs a model over rows, with a KV cache of its own."""

    cache: KVCache

    @property
    def native(self) -> bool:
        """Whether passes are native code."""

    @property
    def has_native_attention(self) -> bool:
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


class TransformersDecoder:
    """Any transformers causal language model, through its own forward and `attention_interface`."""

    native = False

    def __init__(self, model: Any, heads: Heads, slots: int, positions: int, sharding: Sharding | None = None) -> None:
        """`sharding`: how ranks share the model, if they do.

        Raises ValueError if what it computes is not what transformers does. Ranks are compared with nothing: a part
        alone computes nothing.
        """
        self._layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._parameters = inspect.signature(model.forward).parameters
        sample = _sample(model, positions, slots // 3)
        theirs = None if sharding is not None else _eager_logits(model, sample)
        model.set_attn_implementation(ATTENTION)
        use_chunked_linear(model)
        _route_row_by_row(model)
        if sharding is not None:
            sharding.install_collectives(model)
        weight = model.get_output_embeddings().weight
        self._attention, self.cache = make_attention(self._layers, heads, slots, weight)
        self._model = model
        base: Any = self._model.base_model
        self._embedding: Any = base.get_input_embeddings()
        self._head: nn.Module = self._model.get_output_embeddings()
        self._taps: list[nn.Module] = [self._embedding, *_layers_of(base, self._layers), base]
        self._check(sample, theirs)

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        kept: dict[int, Tensor] = {}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in set(layers)]
        try:
            logits = self._forward(self._attention(rows), wanted)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack([kept[n][: len(rows)] for n in layers], 1) if layers else None

    def _forward(self, this: Pass, wanted: Sequence[int]) -> Tensor:
        places = padded_row_indices(wanted, self.cache.device)
        keeps = "logits_to_keep" in self._parameters
        with use_pass(this):
            logits: Tensor = self._model(
                input_ids=this.tokens.unsqueeze(0),
                position_ids=this.positions.unsqueeze(0),
                use_cache=False,
                **({"logits_to_keep": places} if keeps else {}),
            ).logits[0]
        return (logits if keeps else logits[places])[: len(wanted)]

    @torch.inference_mode()
    def _check(self, tokens: Sequence[int], theirs: Tensor | None) -> None:
        """Raises ValueError unless every layer attends by way of `attention_interface`, once, and logits are `theirs`:
        of the whole sample in one pass; and of its second half as guesses in the company of another request."""
        half, other = len(tokens) // 2, tokens[::-1]
        slots = iter(range(1, 3 * len(tokens) + 1))
        whole, start, company = (SlotTable(itertools.islice(slots, n)) for n in (len(tokens), half, len(tokens)))
        heard = _RecordingPass(self._attention([whole.row(token, i) for i, token in enumerate(tokens)]))
        logits = self._forward(heard, range(len(tokens)))
        if sorted(heard.layers) != list(range(self._layers)):
            raise ValueError(
                f"its {self._layers} layers attend {len(heard.layers)} times by way of transformers' attention "
                "interface, and not once each: what else they do with keys and values is not known here"
            )
        if theirs is None:
            return
        self([start.row(token, i) for i, token in enumerate(tokens[:half])], [], [])
        branch = list(itertools.islice(slots, len(tokens) - half))
        guesses = [start.branch_row(token, branch[: i + 1]) for i, token in enumerate(tokens[half:])]
        beside = [company.row(token, i) for i, token in enumerate(other)]
        mixed = [*beside[:half], *guesses, *beside[half:]]
        guessed, _ = self(mixed, range(half, half + len(guesses)), [])
        for shape, ours, wanted in (("", logits, theirs), (" beside another request", guessed, theirs[half:])):
            each = _relative_error(ours, wanted)
            # Where rounding may choose other experts here and there, a mistake still shows at most positions.
            off = float(each.max() if self.cache.dtype == torch.float32 else each.median())
            if not off <= TOLERANCE[self.cache.dtype]:
                raise ValueError(f"its logits{shape} are off by {off:.2g} of the largest that transformers computes")

    @property
    def has_native_attention(self) -> bool:
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


@dataclass(slots=True)
class _RecordingPass:
    """A pass that notes which layers attend."""

    inner: Pass
    layers: list[int] = field(default_factory=list)

    @property
    def cache(self) -> KVCache:
        return self.inner.cache

    @property
    def tokens(self) -> Tensor:
        return self.inner.tokens

    @property
    def positions(self) -> Tensor:
        return self.inner.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, *told: Any) -> Tensor:
        self.layers.append(layer)
        return self.inner.attend(query, key, value, layer, *told)


def _layers_of(base: Any, count: int) -> nn.ModuleList:
    """The decoder's layers: `layers`, or whatever list of modules has as many. Raises ValueError if there is none."""
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    layers = getattr(base, "layers", lists[0] if lists else None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError("it has no list of layers")
    return layers


def _sample(model: Any, *most: int) -> list[int]:
    """Tokens, as many as there may be."""
    size = len(model.get_output_embeddings().weight)
    return [(7 * i + 3) % size for i in range(min(SAMPLE, *most))]


@torch.inference_mode()
def _eager_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocabulary], float32, as transformers computes them by plain formulas."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(torch.tensor([tokens], device=model.device), use_cache=False).logits
    return logits[0].float()


def _relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """By how much logits [n, vocabulary] differ at most, [n], in parts of the largest of theirs."""
    return (ours.float() - theirs).abs().amax(-1) / theirs.abs().max()


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = (output if isinstance(output, Tensor) else output[0])[0]  # the whole model's output is a mapping, too

    return hook


def padded_row_indices(wanted: Sequence[int], device: torch.device) -> Tensor:
    """As many places of rows as a product takes: int64, a multiple of GROUP of them."""
    padding = -len(wanted) % GROUP if wanted else GROUP
    return torch.tensor([*wanted, *[0] * padding], device=device)


class LlamaDecoder:
    """Layers of the Llama kind, see `paceline.model.network_factory`.

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
            self._gathered = part if whole else lambda x: ranks.all_gather(part(x), width)
        self._network, self.cache = make_network(
            [layer_of(layer) for layer in base.layers],
            heads,
            slots,
            RotaryTables.of(base.rotary_emb, positions),
            partial(_compare, model, (positions, slots - 1)) if ranks is None else None,
            hidden=self._embedding.shape[1],
            eps=float(base.norm.variance_epsilon),
            scale=float(base.layers[0].self_attn.scaling),
            embedding=self._embedding,
            norm=base.norm.weight,
            head=head.weight if ranks is None else None,
            sums=None if ranks is None else ranks.all_reduce,
        )

    def __call__(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        if self._gathered is None:
            return self._network.run(rows, wanted, layers)
        _, states = self._network.run(rows, [], [*layers, self._final])
        assert states is not None
        logits = self._gathered(states[padded_row_indices(wanted, states.device), -1])[: len(wanted)]
        return logits, states[:, :-1] if layers else None

    @property
    def native(self) -> bool:
        return isinstance(self._network, NativeNetwork)

    has_native_attention = native

    def embedding(self) -> Tensor:
        return self._embedding

    def output(self, final: Tensor) -> Tensor:
        return self._network.output(final)


def layer_of(layer: Any) -> DecoderLayerWeights:
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
    return DecoderLayerWeights(**tensors, window=int(window or 0))


LLAMA_KIND = frozenset({"llama", "mimo", "mistral", "qwen2", "qwen3"})
"""`config.model_type` of architectures whose layers are exactly of the Llama kind, with options that
`DecoderLayerWeights` has."""
SAMPLE = 24
"""Tokens that a native model is compared with transformers' own by."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference of logits between the two, relative to the largest logit. In bf16 transformers' own are off by
several hundredths; a mistake shows by whole units."""


def is_llama_kind(config: Any) -> bool:
    """Whether a model of this configuration has layers of the Llama kind only."""
    plain = getattr(config, "quantization_config", None) is None  # else its weights are transformers' own modules
    return plain and config.model_type in LLAMA_KIND and config.hidden_act == "silu"


def make_decoder(
    model: nn.Module, heads: Heads, slots: int, positions: int, sharding: Sharding | None = None
) -> Decoder:
    """The fastest decoder that computes this model, over a cache of so many slots and a spare one.

    `sharding`: as ranks share it, if they do.
    """
    if is_llama_kind(model.config):
        return LlamaDecoder(model, heads, slots + 1, positions, sharding)
    return TransformersDecoder(model, heads, slots + 1, positions, sharding)


@torch.inference_mode()
def _compare(model: nn.Module, most: Sequence[int], network: Network) -> None:
    """Raises `NativeUnavailableError` unless the logits of a few tokens are those of transformers' own forward."""
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    tokens = _sample(model, *most)
    lane = SlotTable(range(1, len(tokens) + 1))
    ours, _ = network.run([lane.row(token, i) for i, token in enumerate(tokens)], range(len(tokens)))
    off = float(_relative_error(ours, _eager_logits(model, tokens)).max())
    if not off <= TOLERANCE[weight.dtype]:
        raise NativeUnavailableError(f"its logits are off by {off:.2g} of the largest")
