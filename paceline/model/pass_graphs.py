"""CUDA graphs of a network's passes: a replay starts all kernels of a pass at once.

A graph repeats the same kernels on the same memory, so there is one for each of a few numbers of rows. A pass has its
rows padded up to the next of these, and its tables copied to where the graphs read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.model.attention import KVCache
from paceline.model.paged_attention import PagedAttention, PagedPass
from paceline.model.rows import Row

GRAPH_ROWS = (8, 16, 24, 32, 48, 64)
"""Rows of the graphs. Larger passes are long beside the start of their kernels."""

Outputs: TypeAlias = list[Tensor]
"""[R, hidden size] of each layer."""
Capture: TypeAlias = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Run a function, and return what runs it again on the same memory, and the outputs that this overwrites."""


class CudaCapture:
    """Captures CUDA graphs that share their temporary memory: only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # libraries keep memory for each stream, so all captures share one
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        with torch.cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # libraries allocate at their first call, which a graph must not record
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()
        return graph.replay, outputs


class PassGraphs:
    """The graphs of one network."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[PagedPass], Outputs],
        cache: KVCache,
        attention: PagedAttention,
        longest: int,
        windows: Sequence[int],
        capture: Capture,
    ) -> None:
        """`longest`: positions of a path. `windows`: of the network's layers."""
        self._start = partial(PagedPass.of, cache, attention)
        memory = PagedPass.empty(cache, attention, GRAPH_ROWS[-1], longest, windows)
        self._passes = {size: memory.first(size) for size in GRAPH_ROWS}
        self._graphs = {}
        for size, this in reversed(self._passes.items()):  # the largest first: the others fit into its memory
            this.load(self._start([], size))
            self._graphs[size] = capture(partial(forward, this))

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Outputs | None:
        """The outputs of a pass, valid until the next one; None if it has too many rows."""
        size = next((size for size in GRAPH_ROWS if size >= len(rows)), None)
        if size is None:
            return None
        self._passes[size].load(self._start(rows, size))
        replay, outputs = self._graphs[size]
        replay()
        return outputs
