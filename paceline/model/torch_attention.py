"""How passes attend where there is no native code: by flash-attn where it is installed, else by torch's operators."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.model import flash_attention
from paceline.model.attention import KVCache, Pass, TorchPass
from paceline.model.flash_attention import FlashAttention, FlashPass
from paceline.model.pass_graphs import CudaCapture, Outputs, PassGraphs
from paceline.model.rows import Row

PACKAGE = "flash_attn_3"


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Starts passes over a cache."""

    cache: KVCache
    flash: FlashAttention | None = None
    graphs: bool = False
    """Whether passes of Llama layers are captured as CUDA graphs. They need flash-attn: the shapes of torch's attention
    change with every pass."""

    @classmethod
    def best(cls, cache: KVCache) -> TorchAttention:
        """With what is there, unless PACELINE_FLASH_ATTENTION=0 or PACELINE_CUDA_GRAPHS=0 switches it off."""
        flash = None
        if os.environ.get("PACELINE_FLASH_ATTENTION") != "0":
            flash = flash_attention.find_flash_attention(cache.heads, cache.dtype, cache.device)
        return cls(cache, flash, flash is not None and os.environ.get("PACELINE_CUDA_GRAPHS") != "0")

    def simpler(self) -> TorchAttention | None:
        """What to try if this fails."""
        if self.graphs:
            return replace(self, graphs=False)
        return None if self.flash is None else TorchAttention(self.cache)

    @property
    def name(self) -> str:
        """Results depend on it, bit for bit. Empty for torch's operators."""
        if self.flash is None:
            return ""
        try:
            version = importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        return f"{PACKAGE} {version}{', CUDA graphs' if self.graphs else ''}"

    def start_pass(self, rows: Sequence[Row]) -> Pass:
        if self.flash is None:
            return TorchPass.of(self.cache, rows)
        return FlashPass.of(self.cache, self.flash, rows)

    def capture(
        self, forward: Callable[[FlashPass], Outputs], longest: int, windows: Sequence[int]
    ) -> PassGraphs | None:
        """CUDA graphs of `forward`, see `PassGraphs`; None without."""
        if self.flash is None or not self.graphs:
            return None
        longest = min(longest, len(self.cache.data[0]))  # no path has more positions than there are slots
        return PassGraphs(forward, self.cache, self.flash, longest, windows, CudaCapture(self.cache.device))
