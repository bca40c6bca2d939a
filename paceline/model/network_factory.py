"""Layers of the Llama kind over rows, and attention alone, by native code where it can be had, else by torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from paceline.model.attention import Heads, KVCache, Pass, TorchPass
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables
from paceline.model.layers import TorchNetwork
from paceline.model.native import native_network as native
from paceline.model.native.build import NativeUnavailableError, native_description
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_library import DTYPES
from paceline.model.rows import Row

log = logging.getLogger(__name__)


class Network(Protocol):
    """See `paceline.model.native.native_network.NativeNetwork`."""

    def run(
        self,
        rows: Sequence[Row],
        wanted: Sequence[int],
        layers: Sequence[int] = (),
        *,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def output(self, final: Tensor) -> Tensor: ...


NetworkCheck = Callable[[Network], None]
"""Raises `NativeUnavailableError` if a network does not compute what it should."""


def make_network(
    layers: Sequence[DecoderLayerWeights],
    heads: Heads,
    slots: int,
    rotary: RotaryTables,
    check: NetworkCheck | None = None,
    **options: Any,
) -> tuple[Network, KVCache]:
    """A network over a cache of `slots`. `options`: as of `paceline.model.native.native_network.NativeNetwork`.
    `check` is asked about a native one."""
    weight = layers[0].query
    if weight.device.type == "cpu" and weight.dtype in DTYPES:
        try:
            cache = KVCache(len(layers), slots, heads, weight.dtype, weight.device, native.head_width(heads))
            network = native.NativeNetwork(layers, heads, cache, rotary, **options)
            if check is not None:
                check(network)
        except NativeUnavailableError as error:
            log_once(f"no native pass, torch computes: {error}")
        else:
            log_once(f"native pass: {native_description()}")
            return network, cache
    cache = KVCache(len(layers), slots, heads, weight.dtype, weight.device)
    return TorchNetwork(layers, heads, cache, rotary, **options), cache


StartPass = Callable[[Sequence[Row]], Pass]
"""Begins a pass."""


def make_attention(layers: int, heads: Heads, slots: int, like: Tensor) -> tuple[StartPass, KVCache]:
    """Attention of rows over a cache of `slots`, for layers that transformers runs. `like`: of the dtype and device."""
    if like.device.type == "cpu" and like.dtype in DTYPES:
        try:
            cache = KVCache(layers, slots, heads, like.dtype, like.device, native.head_width(heads))
            attention = NativeAttention(cache)
        except NativeUnavailableError as error:
            log_once(f"no native attention, torch computes: {error}")
        else:
            log_once(f"native attention: {native_description()}")
            return attention, cache
    cache = KVCache(layers, slots, heads, like.dtype, like.device)
    return partial(TorchPass.of, cache), cache


_logged: set[str] = set()


def log_once(line: str) -> None:
    """Log a line, once in this process."""
    if line not in _logged:
        _logged.add(line)
        log.info(line)
