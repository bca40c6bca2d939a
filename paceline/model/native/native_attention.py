"""Attention as one native call per layer, for models whose other operators are torch's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import AttentionOptions, KVCache
from paceline.model.native.native_library import NativeLibrary, Pointer, address
from paceline.model.native.packed_rows import PackedRows, RowsSpec
from paceline.model.rows import GROUP, Row


class _NativeOptions(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", ctypes.c_int32), ("sinks", Pointer))


class _AttentionSpec(ctypes.Structure):
    _fields_ = (
        ("rows", RowsSpec),
        ("options", _NativeOptions),
        *((name, Pointer) for name in ("queries", "keys", "values", "cache", "out")),
        ("slots", ctypes.c_int64),
    )


class NativeAttention:
    """Starts passes over a cache."""

    def __init__(self, cache: KVCache) -> None:
        """`cache`: with heads of `head_width`, on a CPU, in one of `DTYPES`. Raises `NativeUnavailableError`."""
        self.cache = cache
        self._native = NativeLibrary.instance()
        heads = cache.heads
        shape = heads.kv_heads, heads.queries_per_kv, cache.width
        self._handle = self._native.create(self, "attention", cache.dtype == torch.bfloat16, cache.is_int8, *shape)

    def __call__(self, rows: Sequence[Row]) -> NativePass:
        return NativePass(self, rows)

    def run(self, spec: _AttentionSpec) -> None:
        self._native.run("attention_run", self._handle, ctypes.byref(spec))


class NativePass:
    """A `Pass` whose `attend` is one native call. Results of padding rows are zero."""

    def __init__(self, attention: NativeAttention, rows: Sequence[Row]) -> None:
        self.cache = attention.cache
        self._attention, self._rows = attention, PackedRows(rows)
        columns = torch.tensor([[row.token, row.position] for row in rows])
        self.tokens, self.positions = F.pad(columns, (0, 0, 0, -len(rows) % GROUP)).T.contiguous()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        query, key, value = (heads.to(self.cache.dtype).contiguous() for heads in (query, key, value))
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        out = torch.zeros(query.shape, dtype=query.dtype)
        spec = _AttentionSpec(
            self._rows.spec,
            _NativeOptions(options.scale, options.softcap, options.window, address(sinks)),
            *map(address, (query, key, value, self.cache.data[layer], out)),
            self.cache.slot_count,
        )
        self._attention.run(spec)
        return out.view(len(out), -1)
