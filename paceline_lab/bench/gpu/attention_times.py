"""Attention of one layer of an 8B model, by the best kernel there is, after contexts of many lengths.

Rows are chains of guesses. `us` is one layer's, storing included; `bytes_us` is the time of reading the context's keys
and values at the speed of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from paceline.model.attention import AttentionOptions, Heads, KVCache
from paceline.model.rows import GROUP, Row, SlotTable
from paceline.model.torch_attention import TorchAttention
from paceline_lab.bench.gpu.device_times import copy_bytes_per_s, device_us

CONTEXTS = {"cuda": (120, 1024, 4096, 16384, 32768, 131072), "cpu": (20, 120)}
ROWS = (1, 8, 25, 64)
HEADS = Heads(8, 4, 128)
LAYERS = 4
"""They take turns, so that no cache holds a long context."""
CHAIN = 8
"""Depth of the chains of guesses."""


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    bytes_per_s, contexts = copy_bytes_per_s(device), CONTEXTS[device.type]
    cache = KVCache(LAYERS, contexts[-1] + ROWS[-1] + 1, HEADS, torch.bfloat16, device)
    attention = next(TorchAttention.ways(cache, cache.slot_count))
    yield {"attention": attention.name or "torch"}
    for context in contexts:
        size = KVCache.bytes_per_slot(1, HEADS, torch.bfloat16) * context
        us = {count: round(_us(attention, guesses(context, count), device), 2) for count in ROWS}
        yield {f"after {context}": {"us": us, "bytes_us": round(1e6 * size / bytes_per_s, 2)}}


def guesses(context: int, count: int) -> list[Row]:
    """Chains of guesses, CHAIN deep, after `context` positions."""
    table = SlotTable(range(1, context + 1))
    return [table.branch_row(0, range(context + 1 + i - i % CHAIN, context + 2 + i)) for i in range(count)]


@torch.inference_mode()
def _us(attention: TorchAttention, rows: Sequence[Row], device: torch.device) -> float:
    padded, width = -(-len(rows) // GROUP) * GROUP, HEADS.head_size
    query = torch.randn(padded, HEADS.kv_heads * HEADS.queries_per_kv, width, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, padded, HEADS.kv_heads, width, dtype=torch.bfloat16, device=device)
    this, options = attention(rows), AttentionOptions(width**-0.5)
    return device_us([partial(this.attend, query, key, value, layer, options) for layer in range(LAYERS)], device)
