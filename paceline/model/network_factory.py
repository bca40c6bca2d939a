"""Llama layers over rows, and attention alone: by native code where there is some, else by torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from paceline.model.attention import Heads, KVCache, Pass, TorchPass
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables
from paceline.model.layers import TorchNetwork
from paceline.model.native.build import NativeUnavailableError, native_description
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_library import DTYPES
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.rows import Row

log = logging.getLogger(__name__)

Network = NativeNetwork | TorchNetwork
StartPass = Callable[[Sequence[Row]], Pass]
N = TypeVar("N")
T = TypeVar("T")


def make_network(
    layers: Sequence[DecoderLayerWeights],
    heads: Heads,
    slots: int,
    rotary: RotaryTables,
    check: Callable[[NativeNetwork], None] | None = None,
    **options: Any,
) -> tuple[Network, KVCache]:
    """A network over a new cache of `slots`. `options`: see `NativeNetwork`. `check` raises `NativeUnavailableError`
    if a native network computes something wrong."""

    def native(cache: KVCache) -> NativeNetwork:
        network = NativeNetwork(layers, heads, cache, rotary, **options)
        if check is not None:
            check(network)
        return network

    def by_torch(cache: KVCache) -> TorchNetwork:
        return TorchNetwork(layers, heads, cache, rotary, **options)

    return _native_or_torch("pass", native, by_torch, len(layers), heads, slots, layers[0].query)


def make_attention(layers: int, heads: Heads, slots: int, like: Tensor) -> tuple[StartPass, KVCache]:
    """Attention over a new cache of `slots`, for layers that transformers runs. `like` has the dtype and the device."""

    def by_torch(cache: KVCache) -> StartPass:
        return partial(TorchPass.of, cache)

    return _native_or_torch("attention", NativeAttention, by_torch, layers, heads, slots, like)


def _native_or_torch(
    name: str,
    native: Callable[[KVCache], N],
    by_torch: Callable[[KVCache], T],
    layers: int,
    heads: Heads,
    slots: int,
    like: Tensor,
) -> tuple[N | T, KVCache]:
    """What `native` makes of a cache with padded heads, or `by_torch` of one without; and that cache."""
    make_cache = partial(KVCache, layers, slots, heads, like.dtype, like.device)
    if like.device.type == "cpu" and like.dtype in DTYPES:
        try:
            cache = make_cache(head_width(heads))
            made = native(cache)
        except NativeUnavailableError as error:
            log_once(f"no native {name}, torch computes: {error}")
        else:
            log_once(f"native {name}: {native_description()}")
            return made, cache
    cache = make_cache()
    return by_torch(cache), cache


_logged: set[str] = set()


def log_once(line: str) -> None:
    """Log a line once per process."""
    if line not in _logged:
        _logged.add(line)
        log.info(line)
