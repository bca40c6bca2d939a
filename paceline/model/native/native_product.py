"""One matrix as native code."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.native.native_library import NativeLibrary, address, pad_columns, padded_size


class NativeProduct:
    """`x @ weight.T + bias`. A row's bits do not depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies weight [out, in] and bias [out], in one of `DTYPES`. Raises `NativeUnavailableError`."""
        self._native = NativeLibrary.instance()
        self._out, self._in = weight.shape
        self._dtype = weight.dtype
        weight = weight.detach().contiguous()
        is_bf16 = weight.dtype == torch.bfloat16
        matrix = is_bf16, address(weight), address(bias), *weight.shape
        self._handle = self._native.create(self, "product", *matrix, self._native.thread_pool)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → float32 [rows, out]."""
        x = pad_columns(x.to(self._dtype))
        y = torch.empty(len(x), padded_size(self._out))
        self._native.run("product_run", self._handle, address(x), len(x), address(y))
        return y[:, : self._out]
