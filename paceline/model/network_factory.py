"""Llama layers over rows, and attention alone: by native code where there is some, else by kernels for GPUs, or by
torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.config.engine_config import KVCacheDtype
from paceline.model.attention import NO_HEADS, Heads, KVCache, Pass, use_passes
from paceline.model.layer_weights import AnyLayerWeights, LayerWeights, RotaryTables, stack_matrices
from paceline.model.layers import TorchNetwork
from paceline.model.native.build import NativeUnavailableError, native_description
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_library import DTYPES
from paceline.model.native.native_network import LayerStates, NativeNetwork, head_width
from paceline.model.rows import Row
from paceline.model.torch_attention import TorchAttention

log = logging.getLogger(__name__)

Network = NativeNetwork | TorchNetwork
N = TypeVar("N")
T = TypeVar("T")


class _CacheShape(NamedTuple):
    """The first arguments of `KVCache`."""

    layers: int
    slots: int
    heads: Heads
    dtype: torch.dtype
    device: torch.device


def make_network(
    layers: Sequence[AnyLayerWeights],
    heads: Heads,
    slots: int,
    rotary: RotaryTables,
    check: Callable[[Network], None] = lambda _: None,
    *,
    positions: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    states: LayerStates | None = None,
    **options: Any,
) -> tuple[Network, KVCache]:
    """A network over a new cache of `slots`. `positions`: of the longest path; None: all that `rotary` has. `states`,
    `options`: see `NativeNetwork`. `check` raises ValueError if a network computes something wrong. Then torch
    computes; if that is wrong, too, this raises it.

    By torch the matrices of a layer are stacked in place, one layer after another, before there is a cache: at no time
    is there more than the weights, a layer and the cache.

    Raises ValueError where there is no native code for `kv_cache_dtype`, and `NativeUnavailableError` if there is none
    for layers that torch's operators do not compute."""
    attending = [layer for layer in layers if isinstance(layer, LayerWeights)]
    like = layers[0].output
    cache = _CacheShape(len(attending), slots, heads, like.dtype, like.device)

    def native(cache: KVCache) -> NativeNetwork:
        return NativeNetwork(layers, heads, cache, rotary, states=states, **options)

    def by_torch(attention: TorchAttention) -> TorchNetwork:
        return TorchNetwork(attending, heads, attention, rotary, **options)

    if (made := _native("pass", native, cache, kv_cache_dtype, check)) is not None:
        return made
    if len(attending) < len(layers) or any(layer.output_gate is not None for layer in attending):
        raise NativeUnavailableError("its layers keep states or gate attention, which takes native code")
    stack_matrices(attending)
    torch.cuda.empty_cache()  # of matrices that were stacked: the cache, and other processes, may need it
    return _by_torch("pass", by_torch, cache, positions or len(rotary.cosines), check)


def make_attention(
    layers: int, heads: Heads, slots: int, positions: int, like: Tensor, kv_cache_dtype: KVCacheDtype = "auto"
) -> tuple[NativeAttention | TorchAttention, KVCache]:
    """Attention over a new cache of `slots`, for layers that transformers runs. `positions`: of the longest path.
    `like` has the dtype and the device.

    Raises ValueError where there is no native code for `kv_cache_dtype`."""
    cache = _CacheShape(layers, slots, heads, like.dtype, like.device)
    if (made := _native("attention", NativeAttention, cache, kv_cache_dtype)) is not None:
        return made
    return _by_torch("attention", lambda attention: attention, cache, positions)


class LayersAttention:
    """Attention over new caches, for layers that transformers runs: those with equal heads share one. Starts passes."""

    def __init__(
        self,
        heads: Mapping[int, Heads],
        slots: int,
        positions: int,
        like: Tensor,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """`heads`: of the layers that attend. Others: see `make_attention`, also for the error."""
        groups: dict[Heads, list[int]] = {}
        for layer, own in sorted(heads.items()):
            groups.setdefault(own, []).append(layer)
        shape = slots, positions, like, kv_cache_dtype
        made = [make_attention(len(layers), own, *shape) for own, layers in (groups or {NO_HEADS: []}).items()]
        self.attentions = [attention for attention, _ in made]
        self.caches = [cache for _, cache in made]
        """The first one is there if no layer attends, too."""
        self.indices = {
            layer: (group, index) for group, layers in enumerate(groups.values()) for index, layer in enumerate(layers)
        }
        """By layer: its cache, and its index there."""

    def __call__(self, rows: Sequence[Row]) -> list[Pass]:
        """One for each cache."""
        return [attention(rows) for attention in self.attentions]

    def use(self, passes: Sequence[Pass]) -> AbstractContextManager[None]:
        """See `use_passes`."""

        def of_layer(layer: int) -> tuple[Pass, int]:
            group, index = self.indices[layer]
            return passes[group], index

        return use_passes(of_layer)


def _native(
    name: str,
    native: Callable[[KVCache], N],
    shape: _CacheShape,
    kv_cache_dtype: KVCacheDtype,
    check: Callable[[N], None] = lambda _: None,
) -> tuple[N, KVCache] | None:
    """What `native` makes of a cache with padded heads, and that cache. None, and nothing is kept, if it cannot be made
    or computes something wrong.

    Raises ValueError if it is None, and `kv_cache_dtype` needs it."""
    if shape.device.type == "cpu" and shape.dtype in DTYPES:
        try:
            cache = KVCache(*shape, head_width(shape.heads), kv_cache_dtype)
            made = native(cache)
            check(made)
        except (NativeUnavailableError, ValueError) as error:
            log_once(f"no native {name}, torch computes: {error}")
        else:
            log_once(f"native {name}: {native_description()}")
            return made, cache
    if kv_cache_dtype != "auto":
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype} takes native code, and its {name} has none here")
    return None


def _by_torch(
    name: str,
    make: Callable[[TorchAttention], T],
    shape: _CacheShape,
    positions: int,
    check: Callable[[T], None] = lambda _: None,
) -> tuple[T, KVCache]:
    """What `make` makes of the first way to attend that computes as `check` wants it, and its cache."""
    for attention in TorchAttention.ways(KVCache(*shape), positions):
        if (made := _one_way(name, make, attention, check)) is not None:
            attention.cache.attention_name = attention.name
            return made, attention.cache
    raise AssertionError("the last way is torch's operators")


def _one_way(
    name: str, make: Callable[[TorchAttention], T], attention: TorchAttention, check: Callable[[T], None]
) -> T | None:
    """None, and nothing is kept, if it fails. Raises RuntimeError or ValueError if it is the last one."""
    try:
        made = make(attention)
        check(made)
    except (RuntimeError, ValueError) as error:
        if attention.kernels is None:
            raise
        log_once(f"{name} without {attention.name}: {error}")
        return None
    return made


_logged: set[str] = set()


def log_once(line: str) -> None:
    """Log a line once per process."""
    if line not in _logged:
        _logged.add(line)
        log.info(line)
