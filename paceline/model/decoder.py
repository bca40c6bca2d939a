"""A transformers causal language model as a function of rows: tokens and positions in, logits out.

`LayeredModel` calls transformers' own forward, whatever the architecture. `LlamaModel` runs Llama layers (Llama,
Mistral, Qwen2, Qwen3, SmolLM, ...) from the same weights: on a CPU as one native call per pass, elsewhere with few
operators. It runs the dense layers of Qwen3.5, too, by native code alone.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.model import qwen35
from paceline.model.attention import ATTENTION, Heads, LayerHeads, Pass, note_heads
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.memory import GRAPH_LOGITS
from paceline.model.gpu.paged_pass import PagedPass
from paceline.model.gpu.pass_graphs import PassGraphs
from paceline.model.layer_weights import (
    MATRICES,
    NORMS,
    AnyLayerWeights,
    DecoderLayerWeights,
    RotaryTables,
)
from paceline.model.layers import Linear, use_chunked_linear
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_network import NativeNetwork
from paceline.model.native_linear import PassRows, called_linear, take_over, use_pass_rows
from paceline.model.network_factory import LayersAttention, Network, log_once, make_network
from paceline.model.rows import GROUP, TILE, Row, SlotTable, device_integers
from paceline.model.states.native_states import DeltaStates
from paceline.model.states.recurrences import StateReader
from paceline.model.states.state_cache import StateCache
from paceline.model.states.stored_states import StateShapes, StoredStates, intercept_states, use_reader
from paceline.model.torch_attention import TorchAttention

if TYPE_CHECKING:  # a model of one process does not load it
    from paceline.model.parallel.sharding import Sharding

log = logging.getLogger(__name__)

LLAMA_KIND = frozenset({"llama", "mimo", "mistral", "qwen2", "qwen3"})
"""`config.model_type` of architectures whose layers are Llama's, with options that `DecoderLayerWeights` has."""
CHECKED_TOKENS = TILE + GROUP
"""Length of the sequence that a loaded model is compared with transformers on: its last rows have a prefix."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference from transformers' logits, relative to the largest logit. Transformers' own bf16 logits are off by
several hundredths; a mistake shows as whole units."""
ROUNDING_SHARE = 3.0
"""In 16 bits the difference may also be this many times that between two of transformers' own ways to attend: it grows
with the number of layers."""
MOST_TOLERANCE = 0.4
"""Whatever transformers' own difference is: its second way may not know a model's attention."""

LITTLE = 0.1
"""Of the weights that native code multiplies by, at most so many are left to torch where it needs no threads."""
MEASURED_ROWS = 256
"""Guesses of a pass whose time is measured, at most."""
CHECKED_REQUESTS = 4
"""Of `check_logits`."""

RunLogits = Callable[[Sequence[Row], Sequence[int]], Tensor]
"""Logits of the wanted rows of a pass."""


class Reference(NamedTuple):
    """What transformers computes for some tokens."""

    logits: Tensor
    """[n, vocabulary], float32."""
    rounding: float = 0.0
    """How far another way of its own is off, relative to the largest logit."""


def make_model(
    network: nn.Module,
    info: ModelInfo,
    positions: int,
    sharding: Sharding | None = None,
    *,
    verify: bool = False,
) -> TransformersModel:
    """The fastest model that runs this network, over a cache of `info.slots`.

    `sharding`: how ranks share the network, if they do. `verify`: compare native code's logits with transformers', too,
    although tests do. Raises ValueError if the network cannot be run over rows.
    """
    if is_llama_kind(network.config):
        return LlamaModel(network, info, positions, sharding, verify=verify)
    if sharding is None and qwen35.runs_natively(network.config):
        try:
            return LlamaModel(network, info, positions, verify=verify)
        except NativeUnavailableError as error:
            log_once(f"{info.name} runs by transformers' code: {error}")
    return LayeredModel(network, info, positions, sharding)


def is_llama_kind(config: Any) -> bool:
    """Whether a model with this configuration has only Llama layers."""
    plain = getattr(config, "quantization_config", None) is None  # else its weights are transformers' own modules
    return plain and config.model_type in LLAMA_KIND and config.hidden_act == "silu"


@torch.inference_mode()
def discover_layers(network: Any, layers: int, device: torch.device) -> tuple[LayerHeads, StateShapes]:
    """The heads of layers that attend by `attention_interface`, and the states that others read. `device`: of the
    network, which may be `meta`.

    Raises ValueError if a layer attends twice, or to what an indexer chooses, or if it does not attend and there are no
    states.
    """
    if getattr(network.config.get_text_config(decoder=True), "index_topk", None):
        raise ValueError("index_topk: its layers attend to what an indexer chooses, which is not known here")
    shapes = StateShapes()
    tokens = torch.zeros(1, GROUP, dtype=torch.int64, device=device)
    with note_heads() as heads, use_reader(shapes):
        network(input_ids=tokens, position_ids=torch.arange(GROUP, device=device).unsqueeze(0), use_cache=False)
    if len(heads) != layers and not shapes.calls:
        raise ValueError(
            f"{layers - len(heads)} of its {layers} layers do not attend by way of transformers' attention interface, "
            "nor keep a state that is known here"
        )
    return heads, shapes


def kept_states(requests: int, rows: int) -> tuple[int, int]:
    """The number of states, and of guesses whose inputs are kept: at least what checks and measurements need."""
    return max(requests, CHECKED_REQUESTS), max(rows, MEASURED_ROWS)


def state_cache(info: ModelInfo, window: int, device: torch.device, *, native: bool) -> StateCache:
    """See `StateCache`."""
    counts = kept_states(info.requests, info.rows)
    return StateCache(*counts, window, device, snapshots=info.snapshots, interval=info.snapshot_interval, native=native)


class LayeredModel(TransformersModel):
    """Any transformers causal language model, through its own forward and `attention_interface`."""

    def __init__(self, network: Any, info: ModelInfo, positions: int, sharding: Sharding | None) -> None:
        """Raises ValueError if the logits are not transformers'. A rank's logits are not checked: it has only parts."""
        self._keeps_logits = "logits_to_keep" in inspect.signature(network.forward).parameters
        tokens = checked_tokens(len(network.get_output_embeddings().weight), positions, info.slots)
        intercept_states(network)
        network.set_attn_implementation(ATTENTION)
        use_chunked_linear(network)
        _route_row_by_row(network)
        if sharding is not None:
            sharding.install_collectives(network)
        self._head: nn.Module = network.get_output_embeddings()
        weight: Any = self._head.weight
        like: Tensor = weight.new_empty(0)
        self._network = network
        with called_linear(network) as linear:
            heads, shapes = discover_layers(network, info.layers, like.device)
        if shapes.calls and sharding is not None:
            raise ValueError("its layers keep states, which ranks do not share yet: set tensor_parallel_size to 1")
        self._attention = LayersAttention(heads, info.slots, info.max_model_len, like, info.kv_cache_dtype)
        cache = self._attention.caches[0]
        super().__init__(info, cache, network.config.get_text_config(decoder=True))
        native = all(isinstance(each, NativeAttention) for each in self._attention.attentions)
        self._states: StoredStates | None = None
        if shapes.calls:
            self.states = state_cache(info, shapes.longest, cache.device, native=native)
            self._states = StoredStates(self.states)
        base: Any = network.base_model
        self._embedding: Any = base.get_input_embeddings()
        self._taps: list[nn.Module] = [self._embedding, *_layers_of(base, self.layers), base]
        self.has_native_attention, self.has_native_products = native, native and sharding is None
        if self.has_native_products:
            del weight
            take_over(linear, self._head)
            matrices = [each for each in network.parameters() if each.dim() > 1]
            multiplied = sum(each.numel() for each in matrices if each.is_meta)
            others = sum(each.numel() for each in matrices if not each.is_meta) - self._embedding.weight.numel()
            self.leaves_little_to_torch = LITTLE * multiplied > others
        self._graphs: PassGraphs | None = None
        self._graph_wanted = torch.zeros(GRAPH_LOGITS, dtype=torch.int64, device=self.device)
        if sharding is None:
            # By native products, too: transformers' own take minutes in bfloat16 on a CPU that does not compute in it.
            expected = _reference(network, tokens)
            network.set_attn_implementation(ATTENTION)

            def check() -> None:
                logits = lambda rows, wanted: self.run(rows, wanted).logits  # noqa: E731
                check_logits(logits, tokens, expected, _rounding_dtype(info, cache.dtype))

            check()
            self._capture(check)

    def _capture(self, check: Callable[[], None]) -> None:
        """Graphs of transformers' forward, where its code can be captured and what they compute is right."""
        attention, *others = self._attention.attentions
        if not isinstance(attention, TorchAttention) or not attention.graphs or self._states is not None:
            return
        if others:
            self.cache.attention_name = replace(attention, graphs=False).name
            log_once(f"no CUDA graphs of {self.name}: its layers differ in their heads")
            return
        try:
            self._graphs = attention.capture(self._graph_outputs)
            check()
        except (RuntimeError, ValueError) as error:
            self._graphs = None
            self.cache.attention_name = replace(attention, graphs=False).name
            log_once(f"no CUDA graphs of {self.name}: {error}")

    def _graph_outputs(self, this: PagedPass) -> list[Tensor]:
        """Logits of `_graph_wanted`, and the outputs of all layers."""
        with self._kept_outputs(range(len(self._taps))) as kept:
            logits = self._logits([this], self._graph_wanted)
        return [logits, *(kept[n] for n in range(len(self._taps)))]

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        if self._graphs is not None and len(wanted) <= GRAPH_LOGITS:
            filled = [*wanted, *[0] * (GRAPH_LOGITS - len(wanted))]
            self._graph_wanted.copy_(device_integers(filled, self.device), non_blocking=True)
            if (outputs := self._graphs.run(rows)) is not None:
                tapped = [outputs[1 + n][: len(rows)] for n in hidden_layers]
                logits = outputs[0][: len(wanted)].clone()  # the next pass overwrites them
                return ModelOutput(logits, torch.stack(tapped, 1) if tapped else None)
        with self._kept_outputs(hidden_layers) as kept:
            logits = self._forward(rows, wanted)
        hidden = torch.stack([kept[n][: len(rows)] for n in hidden_layers], 1) if hidden_layers else None
        return ModelOutput(logits, hidden)

    @contextmanager
    def _kept_outputs(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """The outputs of these layers, [R, hidden size], of the pass that runs within it."""
        kept: dict[int, Tensor] = {}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in set(layers)]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
        """Logits [wanted, vocabulary]."""
        passes = self._attention(rows)
        padded = len(passes[0].tokens)
        reader = None if self._states is None else self._states.reader(rows, padded)
        indices = padded_row_indices(wanted, self.device)
        layers, head = (len(rows), padded), (len(wanted), len(indices))
        with use_pass_rows(PassRows(layers, head if self._keeps_logits else layers)):
            return self._logits(passes, indices, reader)[: len(wanted)]

    def _logits(self, passes: Sequence[Pass], indices: Tensor, reader: StateReader | None = None) -> Tensor:
        """Logits [n, vocabulary] of rows, int64 [n]."""
        with self._attention.use(passes), use_reader(reader):
            logits: Tensor = self._network(
                input_ids=passes[0].tokens.long().unsqueeze(0),
                position_ids=passes[0].positions.long().unsqueeze(0),
                use_cache=False,
                **({"logits_to_keep": indices} if self._keeps_logits else {}),
            ).logits[0]
        return logits if self._keeps_logits else logits.index_select(0, indices)

    def embedding(self) -> Tensor:
        """The network's own weight, or a copy where the module does more than look it up, such as scale it."""
        weight: Tensor = self._embedding.weight.detach()
        if type(self._embedding) is nn.Embedding:
            return weight
        with torch.inference_mode():
            scaled: Tensor = self._embedding(torch.arange(len(weight), device=weight.device))
        return scaled

    def output(self, final: Tensor) -> Tensor:
        logits: Tensor = self._head(final)
        return logits


class LlamaModel(TransformersModel):
    """Llama layers, or Qwen3.5's, see `paceline.model.network_factory`.

    With ranks, weights and heads are one rank's: the columns of the products that end attention and MLP, the rows of
    all other products, and the rows of the output matrix.
    """

    def __init__(
        self,
        network: Any,
        info: ModelInfo,
        positions: int,
        sharding: Sharding | None = None,
        *,
        verify: bool = False,
    ) -> None:
        """Raises `NativeUnavailableError` if Qwen3.5's layers have no native code here."""
        base: Any = network.base_model
        head: Any = network.get_output_embeddings()
        config: Any = network.config.get_text_config(decoder=True)
        heads, ranks = Heads.of(config), None
        if sharding is not None:
            heads, ranks = sharding.heads(heads), sharding.ranks
        parts = _parts_of(base, config, info)
        self._embedding: Tensor = base.embed_tokens.weight
        self._gathered_output: Callable[[Tensor], Tensor] | None = None
        if ranks is not None:  # each may have a part of the vocabulary
            shard, width = Linear(head.weight), head.out_features
            whole = len(head.weight) == width
            self._gathered_output = shard if whole else lambda x: ranks.all_gather(shard(x), width)

        self._network, cache = make_network(
            parts.layers,
            heads,
            info.slots,
            RotaryTables.of(base.rotary_emb, positions),
            partial(_check_network, network, info, positions, verify) if ranks is None else lambda _: None,
            positions=info.max_model_len,
            kv_cache_dtype=info.kv_cache_dtype,
            hidden=self._embedding.shape[1],
            eps=parts.eps,
            scale=parts.scale,
            embedding=self._embedding,
            norm=parts.norm,
            head=head.weight if ranks is None else None,
            sums=None if ranks is None else ranks.all_reduce,
            states=parts.states,
        )
        super().__init__(info, cache, config)
        self._states = parts.states
        self.states = None if parts.states is None else parts.states.cache
        self.native = self.has_native_attention = isinstance(self._network, NativeNetwork)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        if self._gathered_output is None:
            return ModelOutput(*self._network.run(rows, wanted, hidden_layers))
        _, states = self._network.run(rows, [], [*hidden_layers, self.layers + 1])
        assert states is not None
        logits = self._gathered_output(states[padded_row_indices(wanted, states.device), -1])[: len(wanted)]
        return ModelOutput(logits, states[:, :-1] if hidden_layers else None)

    @property
    def device_passes(self) -> DevicePasses | None:
        """None: there are none here."""
        ranks = self._gathered_output is not None
        return None if ranks or isinstance(self._network, NativeNetwork) else self._network.device_passes

    def forward(self, this: Pass) -> Tensor:
        """What `output` takes, [R, hidden size], of a pass of `device_passes`."""
        assert not isinstance(self._network, NativeNetwork)
        return self._network.forward(this)[-1]

    def embedding(self) -> Tensor:
        return self._embedding

    def output(self, final: Tensor) -> Tensor:
        return self._network.output(final)


class _Parts(NamedTuple):
    """Of a network's layers."""

    layers: Sequence[AnyLayerWeights]
    norm: Tensor
    eps: float
    scale: float
    """Of scores."""
    states: DeltaStates | None = None


def _parts_of(base: Any, config: Any, info: ModelInfo) -> _Parts:
    """Of transformers' network without its output matrix."""
    if config.model_type != qwen35.MODEL_TYPE:
        scale = float(base.layers[0].self_attn.scaling)
        return _Parts([layer_of(each) for each in base.layers], base.norm.weight, base.norm.variance_epsilon, scale)
    shape, embedding = qwen35.delta_shape(config), base.embed_tokens.weight
    cache = state_cache(info, shape.taps - 1, embedding.device, native=True)
    layers, scale = [qwen35.layer_of(each) for each in base.layers], Heads.of(config).head_size ** -0.5
    return _Parts(layers, qwen35.norm_of(base.norm), base.norm.eps, scale, DeltaStates(cache, shape, embedding.dtype))


@torch.inference_mode()
def _check_network(network: Any, info: ModelInfo, positions: int, verify: bool, made: Network) -> None:
    """Raises ValueError unless `made` computes what transformers' `network` does. Native code only if `verify`."""
    if isinstance(made, NativeNetwork) and not verify:
        return
    tokens = checked_tokens(len(network.get_output_embeddings().weight), positions, info.slots)
    dtype = _rounding_dtype(info, network.get_output_embeddings().weight.dtype)
    check_logits(lambda rows, wanted: made.run(rows, wanted)[0], tokens, _reference(network, tokens), dtype)


def layer_of(layer: Any) -> DecoderLayerWeights:
    """The weights of transformers' Llama layer."""
    modules: dict[str, Any] = dict(layer.named_modules())
    tensors: dict[str, Any] = {field: modules[name].weight for field, name in MATRICES.items()}
    tensors |= {f"{field}_bias": modules[name].bias for field, name in MATRICES.items()}
    tensors |= {field: modules[name].weight for field, name in NORMS.items() if name in modules}
    return DecoderLayerWeights(**tensors, window=window_of(layer))


def window_of(layer: Any) -> int:
    """Positions that transformers' Llama layer sees; 0: all."""
    attention = layer.self_attn
    return int(getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) or 0)


def check_logits(run: RunLogits, tokens: Sequence[int], expected: Reference, dtype: torch.dtype) -> None:
    """Raises ValueError unless `run` gives the expected logits [n, vocabulary]: with all tokens in one pass, with the
    last few as guesses in a pass of their own, and with the second half as guesses in a pass with another request. Uses
    slots 1 to 3n."""
    tolerance = max(TOLERANCE[dtype], min(ROUNDING_SHARE * expected.rounding, MOST_TOLERANCE))
    half = len(tokens) // 2
    slots = iter(range(1, 3 * len(tokens) + 1))
    whole, start, other = (SlotTable(itertools.islice(slots, n)) for n in (len(tokens), half, len(tokens)))
    last = min(GROUP, half)
    before, after = SlotTable(whole.slots[:-last]), whole.slots[-last:]
    run([before.row(token, i) for i, token in enumerate(tokens[:-last])], [])
    alone = run([before.branch_row(token, after[: i + 1]) for i, token in enumerate(tokens[-last:])], range(last))
    logits = run([whole.row(token, i) for i, token in enumerate(tokens)], range(len(tokens)))
    run([start.row(token, i) for i, token in enumerate(tokens[:half])], [])
    branch = list(itertools.islice(slots, len(tokens) - half))
    guesses = [start.branch_row(token, branch[: i + 1]) for i, token in enumerate(tokens[half:])]
    others = [other.row(token, i) for i, token in enumerate(tokens[::-1])]
    guessed = run([*others[:half], *guesses, *others[half:]], range(half, half + len(guesses)))
    for pass_name, ours, theirs in (
        ("", logits, expected.logits),
        (" beside another request", guessed, expected.logits[half:]),
        (" of guesses alone", alone, expected.logits[-last:]),
    ):
        off = _difference(ours.float(), theirs, dtype)
        if not off <= tolerance:
            raise ValueError(f"its logits{pass_name} are off by {off:.2g} of the largest that transformers computes")


def _rounding_dtype(info: ModelInfo, dtype: torch.dtype) -> torch.dtype:
    """The dtype whose tolerance holds: keys of 8 bits are less exact than bfloat16."""
    return dtype if info.kv_cache_dtype == "auto" else torch.bfloat16


def _difference(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """Of logits [n, vocabulary], relative to the largest."""
    errors = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    # Rounding in 16 bits may choose other experts for a few rows; a mistake still shows in most rows.
    return float(errors.max() if dtype == torch.float32 else errors.median())


def padded_row_indices(wanted: Sequence[int], device: torch.device) -> Tensor:
    """The wanted rows, padded with row 0 to a multiple of GROUP, at least one group: int64."""
    padding = -len(wanted) % GROUP if wanted else GROUP
    return device_integers([*wanted, *[0] * padding], device)


def checked_tokens(vocabulary: int, positions: int, slots: int) -> list[int]:
    """Tokens to compare logits on, few enough for `check_logits`."""
    return [(7 * i + 3) % vocabulary for i in range(min(CHECKED_TOKENS, positions, slots // 3))]


@torch.inference_mode()
def _reference(network: Any, tokens: Sequence[int]) -> Reference:
    """By transformers' eager attention. In 16 bits torch's own attention shows what rounding alone makes of it.

    Products of other shapes often round alike.
    """
    expected = _logits_by(network, tokens, "eager")
    if network.dtype == torch.float32:
        return Reference(expected)
    try:
        other = _logits_by(network, tokens, "sdpa")
    except Exception:  # an architecture without it may fail in any way
        log.debug("transformers has one way to attend", exc_info=True)
        return Reference(expected)
    rounding = _difference(other, expected, network.dtype)
    return Reference(expected, rounding if math.isfinite(rounding) else 0.0)


def _logits_by(network: Any, tokens: Sequence[int], attention: str) -> Tensor:
    """Logits [n, vocabulary], float32."""
    network.set_attn_implementation(attention)
    logits: Tensor = network(torch.tensor([tokens], device=network.device), use_cache=False).logits
    return logits[0].float()


def _route_row_by_row(network: Any) -> None:
    """Let experts multiply each row alone where a product depends on the number of rows.

    In float32 on a CPU it does: on some from the second row on, on others from the fourth. The other rows of the pass
    decide how many rows an expert gets.
    """
    if network.dtype == torch.float32 and network.device.type == "cpu" and network._can_set_experts_implementation():
        network.set_experts_implementation("batched_mm")


def _layers_of(base: Any, count: int) -> nn.ModuleList:
    """The decoder's layers: `layers`, or the first list of `count` modules. Raises ValueError if there is none."""
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    layers = getattr(base, "layers", lists[0] if lists else None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError("it has no list of layers")
    return layers


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = (output if isinstance(output, Tensor) else output[0])[0]  # the whole model's output is a mapping, too

    return hook
