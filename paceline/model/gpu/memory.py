"""What passes on a GPU hold beside weights and cache, for the memory plan.

Counted from shapes. What kernels of libraries allocate for themselves is not in it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from paceline.model.attention import Heads
from paceline.model.paged_attention import LARGEST_HEAD, TRITON
from paceline.model.rows import GROUP, TILE

LOGIT_COPIES = 9
"""Float32 copies of a pass's logits that a draw holds at most. With noise they are 7: the logits, scaled ones of rows
with a temperature, and integers of 64 bits twice. A top-p that sorts the vocabulary takes two more."""
GRAPH_ROWS = 256
"""Rows of the largest CUDA graph."""
TABLE_REQUESTS = 256
"""Requests whose slot tables the device holds at most."""
ATTENTION_ITEMS = 256
"""Pieces of work, of GROUP rows each, that attention keeps a partial result of."""


def kernel_attends(heads: Heads, device: torch.device) -> bool:
    """Whether a kernel is expected to attend there. If it fails when a model is loaded, torch's operators do."""
    return (
        device.type == "cuda"
        and heads.head_size <= LARGEST_HEAD
        and os.environ.get("PACELINE_ATTENTION") != "torch"
        and importlib.util.find_spec(TRITON) is not None
    )


@dataclass(frozen=True, slots=True)
class PassMemory:
    """A model's largest pass. Properties and `total` are bytes."""

    rows: int
    requests: int
    """That run at once."""
    positions: int
    """Of the longest path."""
    rotary_positions: int
    layers: int
    hidden: int
    inner: int
    """Of an MLP."""
    heads: Heads
    dtype: torch.dtype

    def total(self, *, by_kernel: bool) -> int:
        """Beside logits. `by_kernel`: whether a kernel attends."""
        if not by_kernel:
            return self.rotary_tables + self.outputs(self.rows) + self.torch_attention
        eager = self.outputs(self.rows) if self.rows > GRAPH_ROWS else 0
        return self.rotary_tables + self.outputs(GRAPH_ROWS) + eager + self.slot_tables + self.partial_results

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines."""
        return 2 * self.rotary_positions * self.heads.head_size * self.dtype.itemsize

    def outputs(self, rows: int) -> int:
        """Of the embedding, of each layer and of the final norm, which stay, and of the products of one layer."""
        kept, products = (self.layers + 2) * self.hidden, 4 * self.hidden + 3 * self.inner
        return rows * (kept + products) * self.dtype.itemsize

    @property
    def slot_tables(self) -> int:
        """int32 [requests, positions]."""
        return min(self.requests, TABLE_REQUESTS) * self.positions * 4

    @property
    def partial_results(self) -> int:
        """Of attention, until they are merged: float32, and the logarithm of each sum."""
        return ATTENTION_ITEMS * GROUP * self._query_heads * (self.heads.head_size + 1) * 4

    @property
    def torch_attention(self) -> int:
        """What torch's operators copy, as it is and in float32, of the longest prefix or of the tail of each row, and
        three times the scores."""
        copied = 2 * self.heads.kv_heads * self.heads.head_size * (self.dtype.itemsize + 4)
        scores = 3 * self.rows * self._query_heads * 4
        return max(self.positions, self.rows * TILE) * copied + self.positions * scores

    @property
    def _query_heads(self) -> int:
        return self.heads.kv_heads * self.heads.queries_per_kv
