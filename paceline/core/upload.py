"""Numbers of the host on the device of a computation. No copy waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(device: torch.device, *columns: Sequence[float]) -> tuple[Tensor, ...]:
    """Each column as float64 [its length] on the device, all in one copy. Integers below 2^53 stay exact."""
    numbers = torch.tensor([number for column in columns for number in column], dtype=torch.float64)
    return tuple(torch.split(send(numbers, device), [len(column) for column in columns]))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, or itself if it is there. From the host to a GPU it goes through pinned memory."""
    if tensor.device == device:
        return tensor
    return _pinned(tensor, device).to(device, non_blocking=True)


def send_into(tensor: Tensor, memory: Tensor) -> None:
    """`send` a tensor of the host into memory of a device."""
    memory.copy_(_pinned(tensor, memory.device), non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
