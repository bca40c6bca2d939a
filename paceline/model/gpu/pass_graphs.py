"""CUDA graphs of a network's passes: a replay starts all kernels of a pass at once.

A graph repeats the same kernels on the same memory, so there is one for each of a few numbers of rows. A pass has its
rows padded up to the next of these, and what its kernels read of the rows is copied to where the graph reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.model.attention import KVCache
from paceline.model.gpu.memory import GRAPH_ROWS
from paceline.model.gpu.paged_pass import BRANCHES, WRITES, Kernels, PagedPass, PassInput
from paceline.model.gpu.paths import DeviceTables
from paceline.model.rows import Row

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
        kernels: Kernels,
        tables: DeviceTables,
        capture: Capture,
    ) -> None:
        self._kernels, self._padding_slot = kernels, cache.padding_slot
        self._inputs = {size: PassInput(tables, size, WRITES * size, BRANCHES * size) for size in GRAPH_ROWS}
        self._graphs = {}
        for size, this in reversed(self._inputs.items()):  # the largest first: the others fit into its memory
            this.load([], kernels, cache.padding_slot)
            self._graphs[size] = capture(partial(self._run, forward, this, cache))

    def _run(self, forward: Callable[[PagedPass], Outputs], this: PassInput, cache: KVCache) -> Outputs:
        return forward(this.start(cache, self._kernels))

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Outputs | None:
        """The outputs of a pass, valid until the next one; None if its rows, or their branches, are too many."""
        size = next((size for size, this in self._inputs.items() if this.fits(rows)), None)
        if size is None:
            return None
        self._inputs[size].load(rows, self._kernels, self._padding_slot)
        replay, outputs = self._graphs[size]
        replay()
        return outputs
