"""`Tensor` messages ↔ torch: float32, bfloat16, float16 and int64, little-endian, row-major.

torch is imported with the first tensor: most links never carry one.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING

from paceline.v1 import common_pb2 as pb
from paceline.wire.link_errors import WireError

if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 8

if sys.byteorder != "little":
    raise ImportError("tensors are sent little-endian, and this module does not swap bytes")


def encode_tensor(tensor: torch.Tensor) -> pb.Tensor:
    """Encode a tensor of any device and layout. Raises `WireError` for a dtype that the contract lacks."""
    import torch

    number = {dtype: number for number, dtype in _dtypes().items()}.get(tensor.dtype)
    if number is None:
        raise WireError(f"a tensor of {tensor.dtype} cannot be sent")
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return pb.Tensor(dtype=number, shape=tensor.shape, data=flat.view(torch.uint8).numpy().tobytes())


def decode_tensor(message: pb.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU that owns its memory. Raises `WireError` if dtype, shape and data disagree."""
    import torch

    dtype = _dtypes().get(message.dtype)
    if dtype is None:
        raise WireError(f"dtype: {message.dtype} is unknown")
    if len(message.shape) > MAX_DIMENSIONS:
        raise WireError(f"shape: {len(message.shape)} dimensions, more than {MAX_DIMENSIONS}")
    shape = tuple(message.shape)
    size = math.prod(shape) * dtype.itemsize
    if len(message.data) != size:
        raise WireError(f"data: {len(message.data)} bytes where shape {shape} needs {size}")
    if size == 0:
        raise WireError(f"shape: {shape} is empty")
    # bytearray: torch requires writable memory. This is the only copy.
    return torch.frombuffer(bytearray(message.data), dtype=dtype).reshape(shape)


@cache
def _dtypes() -> dict[pb.DataType, torch.dtype]:
    import torch

    return {
        pb.DATA_TYPE_FLOAT32: torch.float32,
        pb.DATA_TYPE_BFLOAT16: torch.bfloat16,
        pb.DATA_TYPE_FLOAT16: torch.float16,
        pb.DATA_TYPE_INT64: torch.int64,
    }
