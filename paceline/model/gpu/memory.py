"""What passes on a GPU hold beside weights and cache, for the memory plan.

Counted from shapes. What kernels of libraries allocate for themselves is not in it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from paceline.model.attention import Heads
from paceline.model.rows import GROUP, TILE

LOGIT_COPIES = 8
"""Float32 copies of a pass's logits that a draw holds at most. With noise they are 7: the logits, scaled ones of rows
with a temperature, and integers of 64 bits twice. With a top-p that sorts the vocabulary they are 7.99, as counted."""
TRITON = "triton"
LARGEST_HEAD = 256
GRAPH_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the CUDA graphs."""
GRAPH_LOGITS = 64
"""Rows whose logits a graph of transformers' forward computes."""
MOST_TABLES = 512
"""Requests whose slot tables the device holds, of a pass: a draft's has up to 256 rows of prompts and 256 of nodes."""
MOST_ITEMS = 256
"""Pieces of work, of GROUP rows each, that attention keeps a result of until all are added up."""


@cache
def triton_compiles() -> bool:
    """Whether Triton is there, and what it compiles the start of a kernel by: a C compiler, and Python's header."""
    compilers = (os.environ.get("CC"), "clang", "gcc")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    found = any(each and shutil.which(each) for each in compilers) and header.exists()
    return found and importlib.util.find_spec(TRITON) is not None


def kernel_attends(heads: Heads, device: torch.device) -> bool:
    """Whether a kernel is expected to attend there. If it fails when a model is loaded, torch's operators do."""
    return (
        device.type == "cuda"
        and heads.head_size <= LARGEST_HEAD
        and os.environ.get("PACELINE_ATTENTION") != "torch"
        and triton_compiles()
    )


@dataclass(frozen=True, slots=True)
class PassMemory:
    """A model's largest pass. Properties and `total` are bytes."""

    rows: int
    positions: int
    """Of the longest path."""
    rotary_positions: int
    layers: int
    hidden: int
    inner: int
    """Of an MLP."""
    heads: Heads
    dtype: torch.dtype
    vocabulary: int = 0
    """Of the logits that graphs compute; 0: they compute none."""

    def total(self, *, by_kernel: bool) -> int:
        """Beside the logits of the largest pass. `by_kernel`: whether a kernel attends."""
        if not by_kernel:
            return self.rotary_tables + self.outputs(self.rows) + self.torch_attention
        eager = self.outputs(self.rows) if self.rows > GRAPH_ROWS[-1] else 0
        graphs = self.kept_outputs(sum(GRAPH_ROWS)) + self.kept_logits + self.products(GRAPH_ROWS[-1])
        return self.rotary_tables + graphs + eager + self.slot_tables + self.partial_results

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines."""
        return 2 * self.rotary_positions * self.heads.head_size * self.dtype.itemsize

    def outputs(self, rows: int) -> int:
        return self.kept_outputs(rows) + self.products(rows)

    def kept_outputs(self, rows: int) -> int:
        """Of the embedding, of each layer and of the final norm: each graph has its own."""
        return rows * (self.layers + 2) * self.hidden * self.dtype.itemsize

    @property
    def kept_logits(self) -> int:
        """Each graph has its own, whatever its number of rows."""
        return len(GRAPH_ROWS) * GRAPH_LOGITS * self.vocabulary * self.dtype.itemsize

    def products(self, rows: int) -> int:
        """Of one layer."""
        return rows * (4 * self.hidden + 3 * self.inner) * self.dtype.itemsize

    @property
    def slot_tables(self) -> int:
        """int32 [tables + 1, positions]."""
        return (MOST_TABLES + 1) * self.positions * 4

    @property
    def partial_results(self) -> int:
        """Of attention, until they are added up: float32, with two numbers of each sum."""
        parts = max(MOST_ITEMS, self.rows) * GROUP + self.rows
        return parts * self._query_heads * (self.heads.head_size + 2) * 4

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
