"""Llama layers as one native call per pass.

A row's result does not depend on the other rows, on the number of threads, or on where keys are in memory: every sum
has one order (see the C++ files).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.model.attention import Heads, KVCache
from paceline.model.layer_weights import (
    LLAMA,
    MATRICES,
    AllReduce,
    AnyLayerWeights,
    DeltaLayerWeights,
    DeltaShape,
    DeltaWeights,
    LayerVariant,
    LayerWeights,
    QuantizedWeight,
    RotaryTables,
    StateFusion,
    Weight,
)
from paceline.model.native.native_library import DENSE, NativeLibrary, Pointer, address, pad_columns, padded_size
from paceline.model.native.packed_rows import PackedRows, RowsSpec
from paceline.model.rows import Row

WIDTH = 32
"""Heads in the cache are padded to a multiple of this."""
_LAYER_PACKED = ctypes.CFUNCTYPE(None)
_SUM = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_float), ctypes.c_int64)


def head_width(heads: Heads) -> int:
    """Numbers per head in the cache, with padding."""
    return -(-heads.head_size // WIDTH) * WIDTH


class _Weights(ctypes.Structure):
    """`Weights` of network.hpp."""

    _fields_ = (("data", Pointer), ("type", ctypes.c_int32))


class _DeltaSpec(ctypes.Structure):
    MATRICES = ("mixed", "gate", "beta", "decay")
    VECTORS = ("convolution", "rates", "offsets", "norm")
    _fields_ = (
        *((name, _Weights) for name in MATRICES),
        *((name, Pointer) for name in (*VECTORS, "memory", "states", "kept")),
    )


class _LayerSpec(ctypes.Structure):
    VECTORS = (
        *("input_norm", "query_bias", "key_bias", "value_bias", "query_norm", "key_norm"),
        *("output_bias", "inner_norm", "gate_bias", "up_bias", "down_bias"),
        *("attention_out_norm", "mlp_out_norm"),
    )
    _fields_ = (
        *((name, _Weights) for name in (*MATRICES, "output_gate")),
        ("delta", _DeltaSpec),
        *((name, Pointer) for name in (*VECTORS, "cosines", "sines")),
        *((name, ctypes.c_int32) for name in ("cache_index", "window", "input_width")),
    )


class _NetworkSpec(ctypes.Structure):
    INTEGERS = (
        *("is_bf16", "layers", "hidden", "inner", "query_heads", "key_value_heads", "head_size", "head_width"),
        *("positions", "vocabulary", "has_states", "norms_residual", "is_int8_cache", "rotary_size", "is_gelu"),
    )
    _fields_ = (
        *((name, ctypes.c_int32) for name in INTEGERS),
        ("delta", ctypes.c_int32 * len(DeltaShape._fields)),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap", "embedding_scale", "residual_scale")),
        *((name, _Weights) for name in ("embedding", "head", "projection")),
        *((name, Pointer) for name in ("norm", "token_norm", "state_norm", "projection_bias", "cache")),
        ("slots", ctypes.c_int64),
        ("sum", Pointer),
        ("layer_packed", Pointer),
    )


class _PassSpec(ctypes.Structure):
    _fields_ = (
        ("rows", RowsSpec),
        *((name, Pointer) for name in ("tokens", "states", "wanted")),
        ("wanted_count", ctypes.c_int32),
        ("logits", Pointer),
        ("taps", Pointer),
        ("tap_count", ctypes.c_int32),
        ("tapped", Pointer),
        ("through_states", Pointer),
    )


class LayerStates(Protocol):
    """See `paceline.model.states.native_states`."""

    shape: DeltaShape

    def new_memory(self) -> list[Tensor]:
        """Of one layer: `memory`, `states` and `kept` of delta_layer.hpp."""

    def start_pass(self, rows: Sequence[Row]) -> ctypes.Structure:
        """`StatePass` of states.hpp."""


class NativeNetwork:
    """Llama layers, with an embedding, a final norm and an output matrix if they are given."""

    def __init__(
        self,
        layers: Sequence[AnyLayerWeights],
        heads: Heads,
        cache: KVCache,
        rotary: RotaryTables,
        *,
        hidden: int,
        eps: float,
        scale: float,
        embedding: Weight | None = None,
        norm: Tensor | None = None,
        head: Weight | None = None,
        sums: AllReduce | None = None,
        fusion: StateFusion | None = None,
        variant: LayerVariant = LLAMA,
        layer_packed: Callable[[], None] = lambda: None,
        states: LayerStates | None = None,
    ) -> None:
        """Weights are copied, except the embedding [vocabulary, hidden]. `cache`: heads have `head_width`. `scale`: of
        scores. `norm` [hidden], `head` [vocabulary, hidden]. `sums`: the sum over the ranks that share the layers.
        `fusion`: passes have states, too. `variant`: with `fusion` or `sums` only Llama's. `layer_packed` is called
        when a layer's weights have been copied. `layers` may read a layer when it is asked for: one is kept at a time.
        `states`: of layers with the gated delta rule, if there are any; not with `fusion` or `sums`.

        Raises `NativeUnavailableError`.
        """
        self._native = NativeLibrary.instance()
        self._hidden, self._dtype = hidden, cache.dtype
        self._vocabulary = 0 if head is None else len(head)
        self._sums = sums
        self._failure: Exception | None = None
        callback = _SUM(self._add_up) if sums is not None else None
        fused, layers = (StateFusion(), layers) if fusion is None else _padded_fusion(fusion, layers, hidden)
        kept = _Addresses()  # until the network has copied the weights
        self._states = states
        feed = _LayerFeed(layers, rotary, layer_packed, states)
        packed = _LAYER_PACKED(feed.packed)
        # The network reads them in place.
        self._kept_alive = (feed.tables, embedding, cache, callback, feed.memories)
        spec = _NetworkSpec(
            is_bf16=cache.dtype == torch.bfloat16,
            layers=len(layers),
            hidden=hidden,
            inner=feed.inner,
            query_heads=heads.kv_heads * heads.queries_per_kv,
            key_value_heads=heads.kv_heads,
            head_size=heads.head_size,
            head_width=cache.width,
            positions=len(rotary.cosines),
            vocabulary=self._vocabulary,
            has_states=fusion is not None,
            norms_residual=fused.norms_residual,
            is_int8_cache=cache.is_int8,
            rotary_size=2 * rotary.cosines.shape[1],
            is_gelu=variant.activation == "gelu_tanh",
            delta=(0,) * len(DeltaShape._fields) if states is None else states.shape,
            eps=eps,
            scale=scale,
            softcap=variant.softcap,
            embedding_scale=variant.embedding_scale,
            residual_scale=variant.residual_scale,
            embedding=kept.weights(embedding),
            head=kept.weights(head),
            projection=kept.weights(fused.projection),
            norm=kept.vector(norm),
            token_norm=kept.vector(fused.token_norm),
            state_norm=kept.vector(fused.state_norm),
            projection_bias=kept.vector(fused.projection_bias),
            cache=address(cache.data),
            slots=cache.slot_count,
            sum=ctypes.cast(callback, Pointer) if callback is not None else None,
            layer_packed=ctypes.cast(packed, Pointer),
        )
        self._handle = self._native.create(self, "network", ctypes.byref(spec), feed.specs, self._native.thread_pool)
        feed.raise_failure()

    def run(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int] = (), *, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One pass: float32 logits [wanted, vocabulary], outputs of `layers` [rows, layers, hidden] if there are any.

        Layer 0 is the first layer's input, n the output of layer n, and the number after the last layer's the final
        norm's output. `states` [rows, hidden]: given exactly if the network has a `StateFusion`. Raises what starting
        a pass through the layers' states raises.
        """
        logits = torch.empty(len(wanted), padded_size(self._vocabulary))
        tapped = torch.empty(len(rows), len(layers), self._hidden, dtype=self._dtype)
        states = None if states is None else states.contiguous()
        packed, numbers = PackedRows(rows), array("i", [*wanted, *layers])
        wanted_address = numbers.buffer_info()[0]
        through_states = None if self._states is None else self._states.start_pass(rows)
        spec = _PassSpec(
            packed.spec,
            tokens=packed.tokens,
            states=address(states),
            wanted=wanted_address,
            wanted_count=len(wanted),
            logits=address(logits),
            taps=wanted_address + len(wanted) * numbers.itemsize,
            tap_count=len(layers),
            tapped=address(tapped),
            through_states=None if through_states is None else ctypes.addressof(through_states),
        )
        self._native.run("network_run", self._handle, ctypes.byref(spec))
        self._raise_failure()
        return logits[:, : self._vocabulary], tapped if layers else None

    def output(self, final: Tensor) -> Tensor:
        """float32 logits [n, vocabulary] of the final norm's outputs [n, hidden]."""
        final = pad_columns(final.to(self._dtype))
        logits = torch.empty(len(final), padded_size(self._vocabulary))
        self._native.run("network_output", self._handle, address(final), len(final), address(logits))
        return logits[:, : self._vocabulary]

    def _add_up(self, values: Any, count: int) -> None:
        """Called within a pass. An exception cannot cross native code, so `run` raises it."""
        if self._sums is None or self._failure is not None:
            return
        numbers = (ctypes.c_float * count).from_address(ctypes.addressof(values.contents))
        partial_sums = torch.frombuffer(numbers, dtype=torch.float32)
        try:
            partial_sums.copy_(self._sums(partial_sums))
        except Exception as error:  # noqa: BLE001
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _Addresses:
    """The addresses of weights, which it keeps alive: matrices contiguous, vectors as contiguous float32."""

    def __init__(self) -> None:
        self._kept: list[Weight] = []

    def layer(
        self, layer: AnyLayerWeights, rotary: RotaryTables, cache_index: int, memory: Sequence[Tensor]
    ) -> _LayerSpec:
        """`memory`: of a layer with the gated delta rule."""
        matrices = [self.weights(getattr(layer, name, None)) for name in (*MATRICES, "output_gate")]
        vectors = [self.vector(getattr(layer, name, None)) for name in _LayerSpec.VECTORS]
        tables = address(rotary.cosines), address(rotary.sines)
        delta, sizes = _DeltaSpec(), (0, 0, 0)
        if isinstance(layer, LayerWeights):
            sizes = cache_index, layer.window, layer.query.shape[1]
        else:
            delta = self._delta(layer.delta, memory)
        return _LayerSpec(*matrices, delta, *vectors, *tables, *sizes)

    def _delta(self, delta: DeltaWeights[Any], memory: Sequence[Tensor]) -> _DeltaSpec:
        matrices = (self.weights(getattr(delta, name)) for name in _DeltaSpec.MATRICES)
        vectors = (self.vector(getattr(delta, name)) for name in _DeltaSpec.VECTORS)
        return _DeltaSpec(*matrices, *vectors, *map(address, memory))

    def weights(self, matrix: Weight | None) -> _Weights:
        if isinstance(matrix, QuantizedWeight):
            self._kept.append(matrix)
            return _Weights(matrix.data.ctypes.data, matrix.type)
        return _Weights(None if matrix is None else self._address(matrix), DENSE)

    def vector(self, vector: Tensor | None) -> int | None:
        return None if vector is None else self._address(vector.float())

    def _address(self, tensor: Tensor) -> int:
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class _LayerFeed:
    """Layers for native code, which copies one after another: each is read when the one before has been copied."""

    def __init__(
        self,
        layers: Sequence[AnyLayerWeights],
        rotary: RotaryTables,
        layer_packed: Callable[[], None],
        states: LayerStates | None,
    ) -> None:
        """`rotary`: of layers without tables of their own. `states`: of layers with the gated delta rule."""
        self.specs = (_LayerSpec * len(layers))()
        self.tables: list[RotaryTables] = []
        self.memories: list[Sequence[Tensor]] = []
        """Both of the layers that have been read."""
        self._layers, self._rotary, self._layer_packed, self._states = layers, rotary, layer_packed, states
        self._done = 0
        self._failure: Exception | None = None
        first = layers[0]
        self.inner = len(first.gate)
        self._give(first)

    def packed(self) -> None:
        """Called by native code when a layer has been copied. An exception cannot cross it: see `raise_failure`."""
        self._done += 1
        try:
            self._layer_packed()
            if self._done < len(self._layers) and self._failure is None:
                self._give(self._layers[self._done])
        except Exception as error:  # noqa: BLE001
            self._failure = error
        if self._failure is not None and self._done < len(self._layers):
            self.specs[self._done] = self.specs[self._done - 1]  # is copied, and dropped with the network

    def raise_failure(self) -> None:
        """Raises what reading a layer raised."""
        if self._failure is not None:
            raise self._failure

    def _give(self, layer: AnyLayerWeights) -> None:
        addresses, memory = _Addresses(), list[Tensor]()
        self.tables.append((layer.rotary if isinstance(layer, LayerWeights) else None) or self._rotary)
        cache_index = self._done - len(self.memories)  # layers without a memory have keys
        if isinstance(layer, DeltaLayerWeights):
            assert self._states is not None
            memory = self._states.new_memory()
            self.memories.append(memory)
        self.specs[self._done] = addresses.layer(layer, self.tables[-1], cache_index, memory)
        self._kept = addresses  # until the next has taken its place


def _padded_fusion(
    fusion: StateFusion, layers: Sequence[AnyLayerWeights], hidden: int
) -> tuple[StateFusion, Sequence[AnyLayerWeights]]:
    """Pad the matrices that multiply embedding and state with zeros where native code pads the two. Quantised ones need
    no padding: their rows are whole blocks."""

    def aligned(weight: Weight) -> Weight:
        if isinstance(weight, QuantizedWeight):
            return weight
        return pad_columns(weight.detach().reshape(-1, hidden)).view(len(weight), -1)

    if fusion.projection is not None:
        return replace(fusion, projection=aligned(fusion.projection)), layers
    first = layers[0]
    assert isinstance(first, LayerWeights)
    first = replace(first, query=aligned(first.query), key=aligned(first.key), value=aligned(first.value))
    return fusion, [first, *layers[1:]]
