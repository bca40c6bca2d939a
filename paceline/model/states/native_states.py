"""States and convolutions of recurrent layers as one native call per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.model.attention import lazy_zeros
from paceline.model.layer_weights import DeltaShape
from paceline.model.native.native_library import NativeLibrary, Pointer, address, pad_columns
from paceline.model.rows import Row
from paceline.model.states.recurrences import Convolution, Scan
from paceline.model.states.state_cache import StateCache, StatePass

SILU = ("silu", "swish")


class _TokenOrder(ctypes.Structure):
    _fields_ = (
        *(("count", ctypes.c_int64), ("parents", Pointer), ("sources", Pointer)),
        *(("save_count", ctypes.c_int64), ("saves", Pointer)),
    )


class StatePassSpec(ctypes.Structure):
    """`StatePass` of states.hpp."""

    rows: int
    """Of the pass, without padding."""
    kept_alive: StatePass
    _fields_ = (
        ("order", _TokenOrder),
        *(("fresh_count", ctypes.c_int64), ("fresh", Pointer)),
        *((name, ctypes.c_int64) for name in ("window", "first_entry", "first_row")),
        ("windows", Pointer),
        *(("tail_count", ctypes.c_int64), ("tail_states", Pointer), ("tails", Pointer)),
        *(("guess_count", ctypes.c_int64), ("guesses", Pointer), ("entries", Pointer)),
    )

    @classmethod
    def of(cls, cache: StateCache, rows: Sequence[Row], padded: int) -> StatePassSpec:
        """Of the next pass. Raises as `StateCache.paths`."""
        this = cache.paths(rows, padded)
        order = this.order
        assert order is not None
        spec = cls(
            _TokenOrder(
                *(len(order.parents), address(order.parents), address(order.sources)),
                *(len(order.saves), address(order.saves)),
            ),
            *(len(this.fresh), address(this.fresh)),
            *(cache.window, cache.first_entry, cache.first_row),
            address(this.windows),
            *(len(this.tails), address(this.tail_states), address(this.tails)),
            *(len(this.guesses), address(this.guesses), address(this.entries)),
        )
        spec.rows, spec.kept_alive = len(rows), this
        return spec


class _ScanSpec(ctypes.Structure):
    _fields_ = (
        ("this", Pointer),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "groups", "size", "channels", "decays", "has_betas", "is_tiled")
        ),
        *((name, Pointer) for name in ("rates", "states", "inputs", "kept", "queries", "out")),
    )


class _ConvolutionSpec(ctypes.Structure):
    _fields_ = (
        ("this", Pointer),
        *((name, ctypes.c_int32) for name in ("is_bf16", "is_silu", "rows", "channels", "taps")),
        *((name, Pointer) for name in ("weights", "bias", "memory", "inputs", "out")),
    )


class DeltaStates:
    """States of the layers of a `NativeNetwork` with the gated delta rule."""

    def __init__(self, cache: StateCache, shape: DeltaShape, dtype: torch.dtype) -> None:
        """`dtype`: of a convolution's inputs."""
        self.cache, self.shape, self._dtype = cache, shape, dtype
        self.nbytes = 0
        """Of what layers have."""

    def new_memory(self) -> list[Tensor]:
        """Of one layer, with zeros: a convolution's memory [first row, mixed], states [states, heads, size, channels],
        and inputs of guesses [guesses, scanned]."""
        cache, shape = self.cache, self.shape
        memory = [
            lazy_zeros((cache.first_row, shape.mixed), self._dtype, cache.device),
            lazy_zeros((cache.states, shape.heads, shape.size, shape.channels), torch.float32, cache.device),
            lazy_zeros((cache.guesses, shape.scanned), torch.float32, cache.device),
        ]
        self.nbytes += sum(each.nbytes for each in memory)
        return memory

    def start_pass(self, rows: Sequence[Row]) -> StatePassSpec:
        """Raises as `StateCache.paths`."""
        return StatePassSpec.of(self.cache, rows, len(rows))


def native_scan(spec: StatePassSpec, scan: Scan, states: Tensor, inputs: Tensor, kept: Tensor) -> Tensor:
    """What every row reads, [R, H, C]; `states` [n, H, N, C] are advanced. inputs, kept: of rows, and of guesses, which
    are kept; see `Scan.inputs`."""
    heads, size, channels = scan.shape
    queries, out = scan.queries.contiguous(), torch.zeros(scan.values.shape)
    rates = None if scan.rates is None else scan.rates.contiguous()
    scanned = _ScanSpec(
        ctypes.addressof(spec),
        *(heads, scan.keys.shape[1], size, channels, scan.decays.shape[2], scan.betas is not None, False),
        *map(address, (rates, states, inputs, kept, queries, out)),
    )
    NativeLibrary.instance().run("scan", ctypes.byref(scanned))
    return out


class NativeConvolution:
    """A layer's convolution."""

    def __init__(self, convolution: Convolution) -> None:
        """Copies the weights."""
        weight, bias = convolution.weight.detach().float(), convolution.bias
        self._weights = pad_columns(weight.T)
        self._bias = None if bias is None else pad_columns(bias.detach().float())
        self._convolution, self._is_silu = convolution, convolution.activation in SILU

    def __call__(self, spec: StatePassSpec, memory: Tensor, inputs: Tensor) -> Tensor:
        """Of inputs [R, C], [R, C]; `memory` [first row, C] is advanced."""
        out = torch.zeros_like(inputs)
        convolved = _ConvolutionSpec(
            ctypes.addressof(spec),
            *(inputs.dtype == torch.bfloat16, self._is_silu, spec.rows, inputs.shape[1], self._convolution.taps),
            *map(address, (self._weights, self._bias, memory, inputs, out)),
        )
        NativeLibrary.instance().run("convolution", ctypes.byref(convolved))
        return out if self._is_silu else self._convolution.activated(out)
