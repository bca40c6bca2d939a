"""Copies from an accelerator that are waited for when they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Tensors on their way to the CPU. A CPU's own are not copied."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arrived: Any = None
        self._tensors = list(tensors)
        if tensors[0].is_cuda:
            self._tensors = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
            for copy, each in zip(self._tensors, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        """The tensors on the CPU. Waits for these copies, but not for what was queued after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
