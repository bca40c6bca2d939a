"""States and convolutions of recurrent layers as one native call per layer."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.model.native.native_library import NativeLibrary, Pointer, address, pad_columns
from paceline.model.states.recurrences import Convolution, Scan
from paceline.model.states.state_cache import StateCache, StatePass, TokenOrder

SILU = ("silu", "swish")


class _TokenOrder(ctypes.Structure):
    _fields_ = (
        *(("count", ctypes.c_int64), ("parents", Pointer), ("sources", Pointer)),
        *(("save_count", ctypes.c_int64), ("saves", Pointer)),
    )


class _ScanSpec(ctypes.Structure):
    _fields_ = (
        ("order", _TokenOrder),
        *((name, ctypes.c_int32) for name in ("heads", "groups", "size", "channels", "decays", "has_betas")),
        *((name, Pointer) for name in ("rates", "states", "inputs", "kept", "queries", "out")),
    )


class _ConvolutionSpec(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("is_bf16", "is_silu", "rows", "channels", "taps", "window")),
        *((name, Pointer) for name in ("weights", "bias", "memory")),
        *((name, ctypes.c_int64) for name in ("first_entry", "first_row")),
        *((name, Pointer) for name in ("inputs", "windows")),
        *(("tail_count", ctypes.c_int64), ("tail_states", Pointer), ("tails", Pointer)),
        *(("guess_count", ctypes.c_int64), ("guesses", Pointer), ("entries", Pointer)),
        ("out", Pointer),
    )


def native_scan(order: TokenOrder, scan: Scan, states: Tensor, inputs: Tensor, kept: Tensor) -> Tensor:
    """What every row reads, [R, H, C]; `states` [n, H, N, C] are advanced. inputs, kept: of rows, and of tokens of
    earlier passes, see `Scan.inputs`."""
    heads, size, channels = scan.shape
    queries, out = scan.queries.contiguous(), torch.zeros(scan.values.shape)
    rates = None if scan.rates is None else scan.rates.contiguous()
    spec = _ScanSpec(
        _TokenOrder(
            len(order.parents), address(order.parents), address(order.sources), len(order.saves), address(order.saves)
        ),
        *(heads, scan.keys.shape[1], size, channels, scan.decays.shape[2], scan.betas is not None),
        *map(address, (rates, states, inputs, kept, queries, out)),
    )
    NativeLibrary.instance().run("scan", ctypes.byref(spec))
    return out


class NativeConvolution:
    """A layer's convolution."""

    def __init__(self, convolution: Convolution) -> None:
        """Copies the weights."""
        weight, bias = convolution.weight.detach().float(), convolution.bias
        self._weights = pad_columns(weight.T)
        self._bias = None if bias is None else pad_columns(bias.detach().float())
        self._convolution, self._is_silu = convolution, convolution.activation in SILU

    def __call__(self, cache: StateCache, this: StatePass, memory: Tensor, inputs: Tensor) -> Tensor:
        """Of inputs [R, C], [R, C]; `memory` [first row, C] is advanced."""
        assert this.order is not None
        out = torch.zeros_like(inputs)
        spec = _ConvolutionSpec(
            *(inputs.dtype == torch.bfloat16, self._is_silu, this.order.rows),
            *(inputs.shape[1], self._convolution.taps, cache.window),
            *map(address, (self._weights, self._bias, memory)),
            *(cache.first_entry, cache.first_row),
            *map(address, (inputs, this.windows)),
            *(len(this.tails), address(this.tail_states), address(this.tails)),
            *(len(this.guesses), address(this.guesses), address(this.entries)),
            address(out),
        )
        NativeLibrary.instance().run("convolution", ctypes.byref(spec))
        return out if self._is_silu else self._convolution.activated(out)
