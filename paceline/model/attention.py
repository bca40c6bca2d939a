"""Attention over rows, independent of the other rows: the interface for transformers' layers, and torch's operators.

`TorchPass` attends in two parts (see `paceline.model.rows`). On a CPU native code is faster, where there is some
(`paceline.model.native.native_attention`).

Shape suffixes: R rows, G groups, P rows of a call, K key-value heads, Q query heads per key-value
head, D head size, C columns of a tile, N positions of a prefix.

The query heads that share a key-value head are treated as rows, so grouped-query attention needs no repeated keys, and
every call has P * Q query rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.engine_config import KVCacheDtype
from paceline.model.rows import TILE, Row, RowBatch, Segment, build_row_batch

ATTENTION = "paceline"
"""The name of `attention_interface` in transformers' registry."""
VECTOR_WIDTH = 64
"""A multiple of the float32 numbers that torch's loops process at a time."""
DIFFERENT_HEADS = "its layers differ in their attention heads: no cache for such models is known here"


class Heads(NamedTuple):
    """The shape of attention, of a layer or of a whole model."""

    kv_heads: int
    queries_per_kv: int
    head_size: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """The heads in a transformers text configuration.

        DeepSeek's latent attention (MLA) is cached uncompressed, with a key and a value for every head. Their sizes
        differ; the smaller one is padded.

        A model of states alone has none, and `NO_HEADS` here. Raises ValueError if layers differ in them.
        """
        if not getattr(config, "num_attention_heads", None):
            return NO_HEADS
        heads = int(config.num_attention_heads)
        if getattr(config, "kv_lora_rank", None):
            return cls(heads, 1, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim))
        shares_key = getattr(config, "model_type", "") == "gpt_bigcode" and config.multi_query
        kv_heads = 1 if shares_key else int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(kv_heads, heads // kv_heads, _head_size(config) or config.hidden_size // heads)


NO_HEADS = Heads(1, 1, 64)
"""Of a cache without layers."""


def _head_size(config: Any) -> int | None:
    """None if the configuration has none. Raises ValueError if layers differ."""
    try:
        size = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None)
    except Exception as error:  # transformers raises it for settings that differ by layer
        raise ValueError(DIFFERENT_HEADS) from error
    return None if size is None else int(size)


SPARE_SLOTS = 2
"""Slots of a cache beside those of tokens, which are 1 to `slots`: slot 0 fills up tiles, and padding rows write into
the last one. No row sees either."""


KEY_BLOCK = 32
"""Numbers of a key in 8 bits that share a scale."""
SCALE_BYTES = 4


class KVCache:
    """Keys and values of every layer, keys first: [layers, slots + SPARE_SLOTS, 2 * K, width].

    For native code those of a head are together: [layers, 2 * K, slots + SPARE_SLOTS, width]. In 8 bits, which only it
    reads, int8 [layers, bytes]: of each head the keys of all slots, then of each the values. A key has `width` codes,
    then the float32 scale of each KEY_BLOCK of them; a value `width` codes, then one scale. A scale is the largest
    magnitude / 127.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        width: int | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """`slots`: of tokens. `dtype`: of queries, and of keys and values when they are stored. `width`: numbers per
        head with padding, for native code; None: the head size, for torch's operators."""
        self.heads, self.dtype, self.width = heads, dtype, width or heads.head_size
        self.kv_cache_dtype = kv_cache_dtype
        self.slot_count = slots + SPARE_SLOTS
        shape: tuple[int, ...] = (layers, self.slot_count, 2 * heads.kv_heads, self.width)
        if self.is_int8:
            shape = (layers, self.slot_count * self.bytes_per_slot(1, heads, dtype, width, kv_cache_dtype))
        elif width is not None:
            shape = (layers, 2 * heads.kv_heads, self.slot_count, width)
        self.data = lazy_zeros(shape, torch.int8 if self.is_int8 else dtype, device)
        self.attention_name = ""
        """What attends to it, if that is neither native code nor torch's operators."""

    @staticmethod
    def bytes_per_slot(
        layers: int, heads: Heads, dtype: torch.dtype, width: int | None = None, kv_cache_dtype: KVCacheDtype = "auto"
    ) -> int:
        """Arguments: see the constructor."""
        width = width or heads.head_size
        if kv_cache_dtype == "int8":
            return layers * heads.kv_heads * (2 * width + (width // KEY_BLOCK + 1) * SCALE_BYTES)
        return layers * 2 * heads.kv_heads * width * dtype.itemsize

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [R, K, width] of rows to their slots, int64 [R]."""
        heads, cache = self.heads.kv_heads, self.data[layer]
        cache[:, :heads].index_copy_(0, slots, key)
        cache[:, heads:].index_copy_(0, slots, value)

    @property
    def padding_slot(self) -> int:
        return self.slot_count - 1

    @property
    def is_int8(self) -> bool:
        return self.kv_cache_dtype == "int8"

    @property
    def device(self) -> torch.device:
        return self.data.device


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU memory that the kernel clears where it is first used: most slots are never used.

    In small pages: a huge one of each head, as numpy asks for them, would be most of a small model's cache.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    untouched = mmap.mmap(-1, max(count, 1) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
        untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype)[:count].view(shape)


class AttentionOptions(NamedTuple):
    """How a layer attends."""

    scale: float
    window: int = 0
    """Positions that a row sees, including its own; 0: all."""
    softcap: float = 0.0
    """Limit of scores, by tanh; 0: none."""
    sinks: Tensor | None = None
    """[K * Q]: scores that take part in the softmax without a value."""


class Pass(Protocol):
    """One forward pass, for a model's layers."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def tokens(self) -> Tensor:
        """int64 [R]. Rows are padded to a multiple of GROUP."""

    @property
    def positions(self) -> Tensor:
        """int64 [R]"""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        """Store this pass's keys and values, then attend every row to its own path.

        query [R, K * Q, width], key and value [R, K, width], in the cache's dtype; the result is [R, K * Q * width].
        """


@dataclass(frozen=True, slots=True)
class RowPermutation:
    """Rows regrouped for attention calls, and back.

    `gather_index` selects from [R * K * Q, D]: call by call, and within a call by key-value head, then row, then query
    head. `scatter_index` [R * K * Q] has the position of each row's heads in that order, `absent` for a row in no call.
    A row that is repeated in a call has the same result each time.
    """

    gather_index: Tensor
    scatter_index: Tensor

    @classmethod
    def of(cls, calls: Sequence[Tensor], rows: int, heads: Heads, absent: int) -> RowPermutation:
        """`calls`: int64 indices of rows, one tensor per call."""
        per_row = heads.kv_heads * heads.queries_per_kv
        device = calls[0].device
        head = torch.arange(per_row, device=device).view(heads.kv_heads, 1, heads.queries_per_kv)
        gather = torch.cat([(call.view(1, -1, 1) * per_row + head).flatten() for call in calls])
        scatter = torch.full((rows * per_row,), absent, device=device)
        scatter[gather] = torch.arange(gather.numel(), device=device)
        return cls(gather, scatter)


@dataclass(slots=True)
class TorchPass:
    """A `Pass` by torch's operators: the cache, the layout, and its index tensors."""

    cache: KVCache
    batch: RowBatch
    tails: RowPermutation
    prefixes: RowPermutation | None
    _tail_masks: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: KVCache, rows: Sequence[Row]) -> TorchPass:
        batch = build_row_batch(rows, cache.device, cache.padding_slot)
        count, segments = batch.slots.numel(), [s.rows for s in batch.segments]
        tails = RowPermutation.of(list(batch.groups), count, cache.heads, absent=0)
        # Rows without a prefix point to an entry after the last one.
        absent = sum(s.numel() for s in segments) * cache.heads.kv_heads * cache.heads.queries_per_kv
        prefixes = RowPermutation.of(segments, count, cache.heads, absent) if segments else None
        return cls(cache, batch, tails, prefixes)

    @property
    def tokens(self) -> Tensor:
        return self.batch.tokens

    @property
    def positions(self) -> Tensor:
        return self.batch.positions

    def tail_mask(self, window: int) -> Tensor:
        """Additive mask [G, 1, P * Q, C] of the tails; `window` 0: no sliding window."""
        if window not in self._tail_masks:
            reach = self.batch.reach.unsqueeze(-1)
            columns = torch.arange(TILE, device=reach.device)
            seen = columns <= reach
            if window:
                seen &= columns > reach - window
            mask = torch.zeros(seen.shape, dtype=self.cache.dtype, device=reach.device).masked_fill_(~seen, -math.inf)
            self._tail_masks[window] = mask.repeat_interleave(self.cache.heads.queries_per_kv, 1).unsqueeze(1)
        return self._tail_masks[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        self.cache.store(layer, self.batch.slots, key, value)
        cache, flat = self.cache.data[layer], query.reshape(-1, self.cache.heads.head_size)
        out, weight = _tails(flat, cache, self, options)
        if self.prefixes is not None:
            out, weight = merge_parts(out, weight, *_prefixes(flat, cache, self, self.prefixes, options))
        return apply_sinks(out, weight, options.sinks).view(query.shape[0], -1)


def merge_parts(out: Tensor, weight: Tensor, prefix_out: Tensor, prefix_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two parts of a path from that to each: results [n, D] and their log-sum-exps [n], float32."""
    share = _elementwise(torch.sigmoid, prefix_weight - weight).unsqueeze(-1)
    merged = torch.lerp(out.float(), prefix_out.float(), share).to(out.dtype)
    return merged, _elementwise(torch.logaddexp, weight, prefix_weight)


def apply_sinks(out: Tensor, weight: Tensor, sinks: Tensor | None) -> Tensor:
    """Results [R * K * Q, D] with sinks [K * Q] in the softmax, which have scores and no values."""
    if sinks is None:
        return out
    share = _elementwise(torch.sigmoid, weight - sinks.float().repeat(len(weight) // len(sinks)))
    return (out.float() * share.unsqueeze(-1)).to(out.dtype)


def _elementwise(function: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    """A function of vectors [n]. An element's result does not depend on its index or on n.

    On a CPU torch computes whole SIMD vectors by one formula and the last few elements by another. How many those are
    depends on the number of rows, so the input is padded to whole vectors.
    """
    size = vectors[0].numel()
    return function(*(F.pad(vector, (0, -size % VECTOR_WIDTH)) for vector in vectors))[:size]


def _tails(flat: Tensor, cache: Tensor, this: TorchPass, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Attend every row to its last tile: results [R * K * Q, D] and log-sum-exp [R * K * Q]."""
    heads, batch = this.cache.heads, this.batch
    groups = batch.groups.shape[0]
    query = flat.index_select(0, this.tails.gather_index).view(groups, heads.kv_heads, -1, heads.head_size)
    kv = cache.index_select(0, batch.tiles).view(groups, TILE, 2 * heads.kv_heads, heads.head_size)
    out, weight = _partial(query, kv, this.tail_mask(options.window), options)
    index = this.tails.scatter_index
    return out.reshape(-1, heads.head_size).index_select(0, index), weight.reshape(-1).index_select(0, index)


def _prefixes(
    flat: Tensor, cache: Tensor, this: TorchPass, order: RowPermutation, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """As `_tails`, for the full tiles. A row without any has log-sum-exp -inf."""
    heads = this.cache.heads
    query = flat.index_select(0, order.gather_index)
    # The entry after the last one is for rows without a prefix.
    out = query.new_zeros(query.shape[0] + 1, heads.head_size)
    weight = torch.full((query.shape[0] + 1,), -math.inf, dtype=torch.float32, device=query.device)
    start = 0
    for segment in this.batch.segments:
        stop = start + segment.rows.numel() * heads.kv_heads * heads.queries_per_kv
        mask = _window_mask(this.batch, segment, options.window, heads, query.dtype)
        kv = cache.index_select(0, segment.slots).unsqueeze(0)
        part = _partial(query[start:stop].view(1, heads.kv_heads, -1, heads.head_size), kv, mask, options)
        if mask is not None:
            part = _zero_hidden_rows(*part, mask)
        out[start:stop] = part[0].reshape(-1, heads.head_size)
        weight[start:stop] = part[1].reshape(-1)
        start = stop
    return out.index_select(0, order.scatter_index), weight.index_select(0, order.scatter_index)


def _window_mask(batch: RowBatch, segment: Segment, window: int, heads: Heads, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [1, 1, P * Q, N] of a prefix under a sliding window; None without a window."""
    if not window:
        return None
    newest_hidden = batch.positions.index_select(0, segment.rows).unsqueeze(-1) - window
    hidden = torch.arange(segment.slots.numel(), device=newest_hidden.device) <= newest_hidden
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
    return mask.repeat_interleave(heads.queries_per_kv, 0)[None, None]


def _zero_hidden_rows(out: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Clear the results of rows that see no position of the prefix: kernels give them NaN, or a weight of 0."""
    seen = (mask > -math.inf).any(-1)
    return out.where(seen.unsqueeze(-1), 0.0), weight.where(seen, -math.inf)


def _partial(query: Tensor, kv: Tensor, mask: Tensor | None, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp: query [G, K, M, D], kv [G, N, 2K, D] → [G, K, M, D], [G, K, M]."""
    heads = query.shape[1]
    key = kv[:, :, :heads].permute(0, 2, 1, 3)
    value = kv[:, :, heads:].permute(0, 2, 1, 3)
    if query.device.type == "cpu" and not options.softcap:
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=options.scale
        )
        return out, weight
    scores = (query.float() @ key.float().transpose(-1, -2)) * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    weight = torch.logsumexp(scores, -1)
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype), weight


PassOfLayer = Callable[[int], tuple[Pass, int]]
"""Of a layer: its pass, and its index in that pass' cache."""
LayerHeads = dict[int, Heads]
"""By layer. The head size is the larger one of keys and values."""

_current: ContextVar[PassOfLayer | LayerHeads] = ContextVar("attention")


@contextmanager
def use_passes(of_layer: PassOfLayer) -> Iterator[None]:
    """Within it, `attention_interface` attends in these passes."""
    token = _current.set(of_layer)
    try:
        yield
    finally:
        _current.reset(token)


def use_pass(this: Pass) -> AbstractContextManager[None]:
    """As `use_passes`, for layers that share one cache."""
    return use_passes(lambda layer: (this, layer))


@contextmanager
def note_heads() -> Iterator[LayerHeads]:
    """Within it, `attention_interface` attends to nothing, and notes the heads of layers. Tensors may be on `meta`."""
    noted: LayerHeads = {}
    token = _current.set(noted)
    try:
        yield noted
    finally:
        _current.reset(token)


IGNORED_ARGUMENTS = frozenset(
    {
        *("cache_position", "dropout", "is_causal", "past_key_values", "position_ids", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Arguments of attention that do not change the result here."""


def attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`Pass.attend` as transformers calls it: query [1, heads, R, D], key [1, K, R, D], value [1, K, R, V] →
    [1, R, heads, V]. D and V may be smaller than the cache's width: they are padded with zeros, which change nothing.

    `s_aux` [heads]: sinks. Raises ValueError for heads that do not fit the cache, and for unknown arguments.
    """
    current = _current.get(None)
    if current is None:
        raise ValueError("this model was loaded for paceline's row runner; call it through paceline.model")
    if unknown := sorted(name for name, given in others.items() if given is not None and name not in IGNORED_ARGUMENTS):
        raise ValueError(f"its attention takes what is not known here: {', '.join(unknown)}")
    if attention_mask is not None:
        raise ValueError("its attention has a mask of its own, which is not known here")
    if others.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads = Heads(key.shape[1], query.shape[1] // key.shape[1], max(key.shape[-1], value.shape[-1]))
    if isinstance(current, dict):
        if layer in current:
            raise ValueError(f"its layer {layer} attends twice: what it does with keys and values is not known here")
        current[layer] = heads
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    this, index = current(layer)
    cache = this.cache
    if heads[:2] != cache.heads[:2] or heads.head_size > cache.width:
        raise ValueError(DIFFERENT_HEADS)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (_pad_heads(t[0].transpose(0, 1), cache.width) for t in (query, key, value))
    out = this.attend(q, k, v, index, AttentionOptions(scale, sliding_window or 0, softcap or 0.0, s_aux))
    return out.view(1, q.shape[0], q.shape[1], cache.width)[..., : value.shape[-1]].contiguous(), None


def _pad_heads(heads: Tensor, size: int) -> Tensor:
    """[..., D] → [..., `size`], with zeros."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))
