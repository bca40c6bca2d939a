"""Layers of the Llama kind over rows, and attention alone, by native code where it can be had, else by torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from paceline.model.attention import Heads, KVCache, Pass, TorchPass
from paceline.model.layers import TorchNetwork
from paceline.model.llama import Layer, RotaryTables
from paceline.model.native import network as native
from paceline.model.native.attention import NativeAttention
from paceline.model.native.build import NativeUnavailableError, description
from paceline.model.native.library import DTYPES
from paceline.model.rows import Row

log = logging.getLogger(__name__)


class Network(Protocol):
    """See `paceline.model.native.network.Network`."""

    def run(
        self,
        rows: Sequence[Row],
        wanted: Sequence[int],
        layers: Sequence[int] = (),
        *,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def output(self, final: Tensor) -> Tensor: ...


Check = Callable[[Network], None]
"""Raises `NativeUnavailableError` if a network does not compute what it should."""


def make_network(
    layers: Sequence[Layer],
    heads: Heads,
    slots: int,
    rotary: RotaryTables,
    check: Check | None = None,
    **options: Any,
) -> tuple[Network, KVCache]:
    """A network over a cache of `slots`. `options`: as of `paceline.model.native.network.Network`. `check` is asked
    about a native one."""
    weight = layers[0].query
    if weight.device.type == "cpu" and weight.dtype in DTYPES:
        try:
            cache = KVCache(len(layers), slots, heads, weight.dtype, weight.device, native.head_width(heads))
            network = native.Network(layers, heads, cache, rotary, **options)
            if check is not None:
                check(network)
        except NativeUnavailableError as error:
            say_once(f"no native pass, torch computes: {error}")
        else:
            say_once(f"native pass: {description()}")
            return network, cache
    cache = KVCache(len(layers), slots, heads, weight.dtype, weight.device)
    return TorchNetwork(layers, heads, cache, rotary, **options), cache


Attention = Callable[[Sequence[Row]], Pass]
"""Begins a pass."""


def make_attention(layers: int, heads: Heads, slots: int, like: Tensor) -> tuple[Attention, KVCache]:
    """Attention of rows over a cache of `slots`, for layers that transformers runs. `like`: of the dtype and device."""
    if like.device.type == "cpu" and like.dtype in DTYPES:
        try:
            cache = KVCache(layers, slots, heads, like.dtype, like.device, native.head_width(heads))
            attention = NativeAttention(cache)
        except NativeUnavailableError as error:
            say_once(f"no native attention, torch computes: {error}")
        else:
            say_once(f"native attention: {description()}")
            return attention, cache
    cache = KVCache(layers, slots, heads, like.dtype, like.device)
    return partial(TorchPass.of, cache), cache


_said: set[str] = set()


def say_once(line: str) -> None:
    """Log a line, once in this process."""
    if line not in _said:
        _said.add(line)
        log.info(line)
