"""Llama layers over rows, and attention alone: by native code where there is some, else by kernels for GPUs, or by
torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from paceline.config.engine_config import KVCacheDtype
from paceline.model.attention import Heads, KVCache, Pass
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables
from paceline.model.layers import TorchNetwork
from paceline.model.native.build import NativeUnavailableError, native_description
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_library import DTYPES
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.rows import Row
from paceline.model.torch_attention import TorchAttention

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
    check: Callable[[Network], None] | None = None,
    *,
    kv_cache_dtype: KVCacheDtype = "auto",
    **options: Any,
) -> tuple[Network, KVCache]:
    """A network over a new cache of `slots`. `options`: see `NativeNetwork`. `check` raises ValueError if a network
    computes something wrong. Then torch computes; if that is wrong, too, this raises it.

    Raises ValueError where there is no native code for `kv_cache_dtype`."""

    return _native_or_torch(
        "pass",
        lambda cache: NativeNetwork(layers, heads, cache, rotary, **options),
        lambda attention: TorchNetwork(layers, heads, attention, rotary, **options),
        *(len(layers), heads, slots, len(rotary.cosines), layers[0].query, check, kv_cache_dtype),
    )


def make_attention(
    layers: int, heads: Heads, slots: int, positions: int, like: Tensor, kv_cache_dtype: KVCacheDtype = "auto"
) -> tuple[StartPass, KVCache]:
    """Attention over a new cache of `slots`, for layers that transformers runs. `positions`: of the longest path.
    `like` has the dtype and the device.

    Raises ValueError where there is no native code for `kv_cache_dtype`."""
    return _native_or_torch(
        "attention",
        NativeAttention,
        lambda attention: attention.start_pass,
        *(layers, heads, slots, positions, like),
        kv_cache_dtype=kv_cache_dtype,
    )


def _native_or_torch(
    name: str,
    native: Callable[[KVCache], N],
    by_torch: Callable[[TorchAttention], T],
    layers: int,
    heads: Heads,
    slots: int,
    positions: int,
    like: Tensor,
    check: Callable[[N | T], None] | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> tuple[N | T, KVCache]:
    """What `native` makes of a cache with padded heads, or `by_torch` of one without; and that cache."""
    make_cache = partial(KVCache, layers, slots, heads, like.dtype, like.device)
    check = check or (lambda _: None)
    if like.device.type == "cpu" and like.dtype in DTYPES:
        made = _native(name, native, check, lambda: make_cache(head_width(heads), kv_cache_dtype))
        if made is not None:
            return made
    if kv_cache_dtype != "auto":
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype} takes native code, and its {name} has none here")
    for attention in TorchAttention.ways(make_cache(), positions):
        try:
            by = by_torch(attention)
            check(by)
        except (RuntimeError, ValueError) as error:
            if attention.kernels is None:
                raise
            log_once(f"{name} without {attention.name}: {error}")
        else:
            attention.cache.attention_name = attention.name
            return by, attention.cache
    raise AssertionError("the last way is torch's operators")


def _native(
    name: str, native: Callable[[KVCache], N], check: Callable[[N], None], make_cache: Callable[[], KVCache]
) -> tuple[N, KVCache] | None:
    """None, and nothing is kept, if it cannot be made or computes something wrong."""
    try:
        cache = make_cache()
        made = native(cache)
        check(made)
    except (NativeUnavailableError, ValueError) as error:
        log_once(f"no native {name}, torch computes: {error}")
        return None
    log_once(f"native {name}: {native_description()}")
    return made, cache


_logged: set[str] = set()


def log_once(line: str) -> None:
    """Log a line once per process."""
    if line not in _logged:
        _logged.add(line)
        log.info(line)
