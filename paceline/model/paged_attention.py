"""Attention over rows on a GPU, by kernels that read keys and values where they are, through tables of slots.

The kernel is that of flash-attn 3 (`flash_attn_interface` of https://github.com/Dao-AILab/flash-attention) where it is
installed, or ours (`paceline.model.triton_attention`). flash-attn 3 takes pages of any size: here a page is one slot.
flash-attn 2 takes pages of 256 positions at least, so it is not used.

A row attends in the two parts of `paceline.model.rows`. In the call for tails each row is a sequence of its own, whose
table lists its path, so that a tree needs no mask. In the call for prefixes adjacent rows with the same prefix are one
sequence. A table begins where the sliding window does. With one split (`num_splits=1`) no sum depends on other rows.

Shape suffixes: R rows, S runs of rows with one prefix, N positions of the longest prefix.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.model.attention import AttentionOptions, Heads, KVCache, apply_sinks, merge_parts
from paceline.model.rows import (
    EMPTY_PREFIX,
    GROUP,
    NULL_SLOT,
    TILE,
    Prefix,
    Row,
    SlotTable,
    device_integers,
    row_columns,
)

log = logging.getLogger(__name__)

FLASH_ATTN, TRITON = "flash_attn_3", "triton"
"""Packages that have a kernel, the better one first."""
FLASH_ATTN_MODULE = "flash_attn_interface"
LARGEST_HEAD = 256
HOPPER = 9
"""Compute capability of the GPUs that flash-attn 3 is made for."""
PagedAttention = Callable[..., Any]
"""`flash_attn_with_kvcache` of flash-attn 3, or ours."""


class AttentionKernel(NamedTuple):
    """What attends, and the package that it is from."""

    package: str
    attend: PagedAttention


def find_kernels(heads: Heads, dtype: torch.dtype, device: torch.device, wanted: str = "") -> Iterator[AttentionKernel]:
    """What computes with these heads on this device, the best first: nothing where it is no NVIDIA GPU.

    `wanted`: the only package to try; empty: both.
    """
    if device.type != "cuda" or heads.head_size > LARGEST_HEAD:
        return
    candidates = [(TRITON, TRITON, "paceline.model.triton_attention")]
    # flash-attn's kernels for Hopper end the process on other GPUs.
    hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
    if hopper and heads.head_size % 8 == 0 and dtype in (torch.bfloat16, torch.float16):
        candidates.insert(0, (FLASH_ATTN, FLASH_ATTN_MODULE, FLASH_ATTN_MODULE))
    for package, needed, module in candidates:
        if (wanted and wanted != package) or importlib.util.find_spec(needed) is None:
            continue
        try:
            kernel: PagedAttention = importlib.import_module(module).flash_attn_with_kvcache
            attend_once(kernel, heads, dtype, device)
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # another torch, or a build for other GPUs
            log.warning("%s is left out: %s", package, error)
        else:
            yield AttentionKernel(package, kernel)


@torch.inference_mode()
def attend_once(kernel: PagedAttention, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """One row that attends to itself. Raises RuntimeError if the kernel cannot."""
    cache = KVCache(1, 1, heads, dtype, device)
    key = torch.zeros(GROUP, heads.kv_heads, heads.head_size, dtype=dtype, device=device)
    query = key.repeat_interleave(heads.queries_per_kv, 1)
    PagedPass.of(cache, kernel, [SlotTable([1]).row(0, 0)]).attend(query, key, key, 0, AttentionOptions(1.0))


class PathTables(NamedTuple):
    """The slots that the rows of a pass see under one sliding window. Runs without rows may follow the others.

    run_starts int32 [S + 1]: the first row of each run, and R. prefixes int32 [S, N], prefix_lengths int32 [S].
    has_prefix bool [R, 1]. tails int32 [R, TILE], tail_lengths int32 [R].
    """

    run_starts: Tensor
    prefixes: Tensor
    prefix_lengths: Tensor
    has_prefix: Tensor
    tails: Tensor
    tail_lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], size: int, window: int, cache: KVCache) -> PathTables:
        """The tables of `rows` and of padding rows, `size` in all. A padding row sees the padding slot."""
        seen: list[tuple[Prefix, int]] = []  # each row's prefix, and the first position in it
        tails: list[list[int]] = []
        for row in rows:
            border = row.position // TILE * TILE
            first = max(0, row.position + 1 - window) if window else 0
            seen.append((row.prefix, first) if first < border else (EMPTY_PREFIX, 0))
            tails.append(row.tile[max(0, first - border) :])
        seen += [(EMPTY_PREFIX, 0)] * (size - len(rows))
        tails += [[cache.padding_slot]] * (size - len(rows))
        runs = [(prefix.slots[first:], len(list(members))) for (prefix, first), members in groupby(seen)]
        prefixes = [slots for slots, _ in runs]

        def integers(values: Any) -> Tensor:
            return device_integers(values, cache.device, torch.int32)

        return cls(
            integers([0, *accumulate(count for _, count in runs)]),
            integers(pad_sequence([torch.tensor([NULL_SLOT]), *prefixes], batch_first=True)[1:]),
            integers([len(prefix) for prefix in prefixes]),
            integers([prefix is not EMPTY_PREFIX for prefix, _ in seen]).bool().unsqueeze(-1),
            integers([tail + [NULL_SLOT] * (TILE - len(tail)) for tail in tails]),
            integers([len(tail) for tail in tails]),
        )

    @classmethod
    def empty(cls, size: int, longest: int, device: torch.device) -> PathTables:
        """For `size` rows, each of which may be a run, and prefixes of up to `longest` positions."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            zeros(size + 1),
            zeros(size, max(1, longest)),
            zeros(size),
            zeros(size, 1).bool(),
            zeros(size, TILE),
            zeros(size),
        )

    def first(self, size: int) -> PathTables:
        """The tables of the first rows, in the same memory."""
        return PathTables(self.run_starts[: size + 1], *(table[:size] for table in self[1:]))

    def load(self, other: PathTables) -> None:
        """Copy tables of as many rows into these. Runs that are left have no rows."""
        runs, longest = other.prefixes.shape
        self.run_starts.fill_(len(self.tails))
        self.run_starts[: runs + 1].copy_(other.run_starts)
        self.prefixes[:runs, :longest].copy_(other.prefixes)
        self.prefix_lengths[:runs].copy_(other.prefix_lengths)
        for mine, theirs in zip(self[3:], other[3:], strict=True):
            mine.copy_(theirs)


@dataclass(slots=True)
class PagedPass:
    """A `Pass` by such a kernel. tokens, positions, slots: int64 [R]. `tables`: by window, made when a layer asks."""

    cache: KVCache
    attention: PagedAttention
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: dict[int, PathTables] = field(default_factory=dict)
    _rows: Sequence[Row] = ()

    @classmethod
    def of(cls, cache: KVCache, attention: PagedAttention, rows: Sequence[Row], size: int | None = None) -> PagedPass:
        """`size`: rows with padding; None: the next multiple of GROUP."""
        size = size or -(-len(rows) // GROUP) * GROUP
        tokens, positions, slots = row_columns(rows, size, cache.padding_slot, cache.device)
        return cls(cache, attention, tokens, positions, slots, {}, rows)

    @classmethod
    def empty(
        cls, cache: KVCache, attention: PagedAttention, size: int, longest: int, windows: Sequence[int]
    ) -> PagedPass:
        """Memory for passes of `size` rows. Arguments: see `PathTables.empty`."""
        zeros = torch.zeros(3, size, dtype=torch.int64, device=cache.device)
        tables = {window: PathTables.empty(size, longest, cache.device) for window in windows}
        return cls(cache, attention, zeros[0], zeros[1], zeros[2], tables)

    def first(self, size: int) -> PagedPass:
        """The first rows, in the same memory."""
        tables = {window: each.first(size) for window, each in self.tables.items()}
        return PagedPass(
            self.cache, self.attention, self.tokens[:size], self.positions[:size], self.slots[:size], tables
        )

    def load(self, other: PagedPass) -> None:
        """Copy a pass of as many rows into this one's memory."""
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.slots.copy_(other.slots)
        for window, tables in self.tables.items():
            tables.load(other.tables_of(window))

    def tables_of(self, window: int) -> PathTables:
        if window not in self.tables:
            self.tables[window] = PathTables.of(self._rows, len(self.tokens), window, self.cache)
        return self.tables[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        count, keys = len(query), self.cache.heads.kv_heads
        self.cache.store(layer, self.slots, key, value)
        pages = self.cache.data[layer].unsqueeze(1)
        tables = self.tables_of(options.window)

        def attend(query: Tensor, table: Tensor, lengths: Tensor, **sequences: Any) -> tuple[Tensor, Tensor]:
            out, weight, *_ = self.attention(
                query,
                pages[:, :, :keys],
                pages[:, :, keys:],
                page_table=table,
                cache_seqlens=lengths,
                softmax_scale=options.scale,
                softcap=options.softcap,
                num_splits=1,
                return_softmax_lse=True,
                **sequences,
            )
            return out, weight

        out, weight = attend(query.unsqueeze(1), tables.tails, tables.tail_lengths)
        prefix_out, prefix_weight = attend(
            query, tables.prefixes, tables.prefix_lengths, cu_seqlens_q=tables.run_starts, max_seqlen_q=count
        )
        prefix_weight = torch.where(tables.has_prefix, prefix_weight.T, -torch.inf)
        size = query.shape[-1]
        out, weight = merge_parts(
            out.reshape(-1, size), weight.reshape(-1), prefix_out.reshape(-1, size), prefix_weight.reshape(-1)
        )
        return apply_sinks(out, weight, options.sinks).view(count, -1)
