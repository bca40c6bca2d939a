"""Tensors that stand for a GPU's: they compute on the CPU, and count what a GPU would have to be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core import logits_rules, upload

DEVICE = torch.device("meta")
"""What the tensors say of themselves. torch has no device `cuda` where it is built for CPUs."""


class GpuTensor(Tensor):
    """A tensor of the pretended GPU.

    Raises RuntimeError where a blocking copy is made on the way (`torch.tensor(..., device=...)`, a list of indices),
    or where tensors of both sides meet.
    """

    reads: ClassVar[list[str]] = []
    """Operators that gave numbers to the host."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        GpuTensor.reads.append("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            cls.reads.append(str(func))
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", DEVICE).type != DEVICE.type:
            cls.reads.append(str(func))
            return func(args[0].inner, **kwargs)
        if any(isinstance(each, Tensor) and not isinstance(each, GpuTensor) for each in tree_leaves((args, kwargs))):
            raise RuntimeError(f"{func} has a tensor that is not on the GPU, or came there by a blocking copy")
        given, options = tree_map(lambda each: each.inner if isinstance(each, GpuTensor) else each, (args, kwargs))
        if "device" in options:
            options["device"] = torch.device("cpu")
        return tree_map(lambda each: cls(each) if isinstance(each, Tensor) else each, func(*given, **options))


class Factories(torch.overrides.TorchFunctionMode):
    """New tensors whose numbers the GPU itself makes."""

    MADE_THERE = (torch.arange, torch.ones, torch.zeros, torch.empty, torch.full)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in self.MADE_THERE and device is not None and torch.device(device) == DEVICE:
            return GpuTensor(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def pretended_gpu() -> Iterator[list[str]]:
    """Gives the reads. Meanwhile uploads from pinned memory make `GpuTensor`s."""
    GpuTensor.reads.clear()
    with pytest.MonkeyPatch.context() as patch, Factories():
        patch.setattr(upload, "send", lambda tensor, device: tensor if tensor.device == device else GpuTensor(tensor))
        patch.setattr(logits_rules, "send", upload.send)
        yield GpuTensor.reads
