"""How passes attend where there is no native code: by a kernel for GPUs, or by torch's operators."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.model import paged_attention
from paceline.model.attention import KVCache, Pass, TorchPass
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.paged_attention import AttentionKernel, PagedPass
from paceline.model.pass_graphs import CudaCapture, Outputs, PassGraphs
from paceline.model.rows import Row

TORCH = "torch"


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Starts passes over a cache."""

    cache: KVCache
    kernel: AttentionKernel | None = None
    graphs: bool = False
    """Whether passes of Llama layers are captured as CUDA graphs. They need a kernel: the shapes of torch's attention
    change with every pass."""

    @classmethod
    def ways(cls, cache: KVCache) -> Iterator[TorchAttention]:
        """What is there, the best first. The last one is torch's operators.

        PACELINE_ATTENTION, which is `flash_attn_3`, `triton` or `torch`, leaves out the others, and
        PACELINE_CUDA_GRAPHS=0 leaves out graphs.
        """
        wanted, graphs = os.environ.get("PACELINE_ATTENTION", ""), os.environ.get("PACELINE_CUDA_GRAPHS") != "0"
        if wanted != TORCH:
            for kernel in paged_attention.find_kernels(cache.heads, cache.dtype, cache.device, wanted):
                if graphs:
                    yield cls(cache, kernel, True)
                yield cls(cache, kernel)
        yield cls(cache)

    @property
    def name(self) -> str:
        """Results depend on it, bit for bit. Empty for torch's operators."""
        if self.kernel is None:
            return ""
        try:
            version = importlib.metadata.version(self.kernel.package)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        return f"{self.kernel.package} {version}{', CUDA graphs' if self.graphs else ''}"

    def start_pass(self, rows: Sequence[Row]) -> Pass:
        if self.kernel is None:
            return TorchPass.of(self.cache, rows)
        return PagedPass.of(self.cache, self.kernel.attend, rows)

    def device_passes(self) -> DevicePasses | None:
        """For graphs of several passes; None without."""
        return None

    def capture(
        self, forward: Callable[[PagedPass], Outputs], longest: int, windows: Sequence[int]
    ) -> PassGraphs | None:
        """CUDA graphs of `forward`, see `PassGraphs`; None without."""
        if self.kernel is None or not self.graphs:
            return None
        longest = min(longest, self.cache.slot_count)  # no path has more positions than there are slots
        return PassGraphs(forward, self.cache, self.kernel.attend, longest, windows, CudaCapture(self.cache.device))
