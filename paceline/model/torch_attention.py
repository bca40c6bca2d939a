"""How passes attend where there is no native code: by flash-attn where it is installed, else by torch's operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from paceline.model import flash_attention
from paceline.model.attention import KVCache, Pass, TorchPass
from paceline.model.flash_attention import FlashPass
from paceline.model.pass_graphs import CudaCapture, Outputs, PassGraphs
from paceline.model.rows import Row


class TorchAttention:
    """Starts passes over a cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._flash = None
        if os.environ.get("PACELINE_FLASH_ATTENTION") != "0":
            self._flash = flash_attention.find_flash_attention(cache.heads, cache.dtype, cache.device)

    @property
    def name(self) -> str:
        return "torch attention" if self._flash is None else "flash-attn 3"

    def start_pass(self, rows: Sequence[Row]) -> Pass:
        if self._flash is None:
            return TorchPass.of(self.cache, rows)
        return FlashPass.of(self.cache, self._flash, rows)

    def capture(
        self, forward: Callable[[FlashPass], Outputs], longest: int, windows: Sequence[int]
    ) -> PassGraphs | None:
        """CUDA graphs of `forward`, see `PassGraphs`. None with PACELINE_CUDA_GRAPHS=0, and without flash-attn: the
        shapes of torch's attention change with every pass."""
        if self._flash is None or os.environ.get("PACELINE_CUDA_GRAPHS") == "0":
            return None
        return PassGraphs(forward, self.cache, self._flash, longest, windows, CudaCapture(self.cache.device))
