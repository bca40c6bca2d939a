"""One matrix as native code."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from paceline.model.native.native_library import NativeLibrary, Pointer, address, pad_columns, padded_size


class NativeProduct:
    """`x @ weight.T + bias`, row by row the same whatever the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in] and bias [out] of one of `DTYPES`, which are copied. Raises `NativeUnavailableError`."""
        self._native = NativeLibrary.instance()
        self._out, self._in = weight.shape
        self._dtype = weight.dtype
        weight = weight.detach().contiguous()
        self._handle = Pointer(
            self._native.lib.paceline_product_create(
                weight.dtype == torch.bfloat16,
                weight.data_ptr(),
                address(bias),
                *weight.shape,
                self._native.thread_pool,
            )
        )
        weakref.finalize(self, self._native.lib.paceline_product_destroy, self._handle)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → float32 [rows, out]."""
        x = pad_columns(x.to(self._dtype))
        y = torch.empty(len(x), padded_size(self._out))
        with self._native.lock:
            self._native.lib.paceline_product_run(
                self._handle, self._native.thread_pool, address(x), len(x), address(y)
            )
        return y[:, : self._out]
