"""How much of a GPU's memory loading a model takes at most."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.model import Model
from paceline.model.model import TransformersModel
from paceline_lab.bench.gpu.random_models import weight_bytes


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Counts from its creation on. `weights`: bytes of the network that is loaded from the device itself; 0: none."""

    device: torch.device
    weights: int

    @classmethod
    def of(cls, network: nn.Module | None, device: torch.device) -> MemoryPeak:
        gc.collect()  # an earlier model
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        return cls(device, 0 if network is None else weight_bytes(network))

    def figures(self, model: Model) -> dict[str, Any]:
        """Gigabytes. `beyond`: of the peak, what is neither weights nor cache. None on a CPU."""
        if self.device.type != "cuda":
            return {}
        assert isinstance(model, TransformersModel)
        used, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        cache = model.cache.data.nbytes
        counts = {"weights": self.weights, "cache": cache, "used": used, "peak": peak}
        if self.weights:
            counts["beyond"] = peak - self.weights - cache
        return {f"{name}_gb": round(count / 1e9, 3) for name, count in counts.items()}
