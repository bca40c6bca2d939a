"""The start of a Triton kernel."""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any, **constants: Any) -> None:
    """Start `kernel` with these arguments on the GPU that has `first`: Triton takes the thread's current device.

    Raises RuntimeError if the kernel cannot be compiled, for example because this GPU lacks what it takes, and Triton's
    ValueError for arguments that the GPU cannot read.
    """
    try:
        with torch.cuda.device_of(first):
            kernel[grid](first, *others, **constants)
    except (TritonError, SubprocessError) as error:
        raise RuntimeError(f"Triton: {error}") from error


def assert_contiguous(*tensors: Tensor | None) -> None:
    """What kernels count on: of other tensors they would read what is behind them."""
    assert all(each is None or each.is_contiguous() for each in tensors)
