"""What a network offers to who runs several of its passes as one graph: passes whose rows are tensors of the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.model.attention import KVCache, Pass
from paceline.model.gpu.paged_pass import Kernels, PagedPass
from paceline.model.gpu.pass_graphs import Capture
from paceline.model.gpu.paths import DeviceTables, RowPaths


@dataclass(frozen=True)
class DevicePasses:
    """Passes over `cache` by `kernels`, and how graphs of them are made. `tables`: those of the cache's requests."""

    cache: KVCache
    kernels: Kernels
    tables: DeviceTables
    capture: Capture

    def start(self, tokens: Tensor, positions: Tensor, slots: Tensor, paths: RowPaths, plan: Tensor | None) -> Pass:
        """tokens, positions, slots: int64 [R]. `plan`: see `PagedPass`. Until it attends, earlier kernels may write
        what it is given."""
        return PagedPass(self.cache, self.kernels, tokens, positions, slots, paths, plan)
