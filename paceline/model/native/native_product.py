"""One matrix as native code, and the tokens that can win a draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight, Weight
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_library import DENSE, NativeLibrary, address, pad_columns, padded_size


class NativeProduct:
    """`x @ weight.T + bias`. A row's bits do not depend on the number of rows.

    A quantised weight takes rows in int8, which this makes of float32.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        """Copies weight [out, in], in one of `DTYPES` or quantised, and bias [out]. Raises `NativeUnavailableError`."""
        self._native = NativeLibrary.instance()
        self._out, self._in = weight.shape
        bias = None if bias is None else bias.float().contiguous()
        if isinstance(weight, QuantizedWeight):
            self._dtype, data, kind = torch.float32, weight.data.ctypes.data, weight.type
        else:
            dense = weight.detach().contiguous()
            self._dtype, data, kind = dense.dtype, dense.data_ptr(), DENSE
        matrix = self._dtype == torch.bfloat16, data, kind, address(bias), *weight.shape
        self._handle = self._native.create(self, "product", *matrix, self._native.thread_pool)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → float32 [rows, out]."""
        x = pad_columns(x.to(self._dtype))
        y = torch.empty(len(x), padded_size(self._out))
        self._native.run("product_run", self._handle, address(x), len(x), address(y))
        return y[:, : self._out]


def dequantize(weight: QuantizedWeight) -> Tensor:
    """The numbers of a quantised weight, float32 [out, in]. Raises `NativeUnavailableError`."""
    numbers, data = torch.empty(weight.shape), weight.data.ctypes.data
    NativeLibrary.instance().lib.paceline_dequantise(weight.type, data, *weight.shape, address(numbers))
    return numbers


def draw_candidates(
    x_RV: npt.NDArray[np.float32],
    keys_R2: npt.NDArray[np.uint32],
    largest_R: npt.NDArray[np.int64],
    leniency: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]] | None:
    """Indices into the flat x_RV of all tokens that can win their row's draw, and their noise integers, both [N].

    x_RV is contiguous and relative to each row's largest logit, which is at index largest_R. keys_R2 are the keys of
    the rows' noise. `leniency`: a factor of the integers' upper limit. None if there is no native code.
    """
    try:
        native = NativeLibrary.instance()
    except NativeUnavailableError:
        return None
    indices, integers = np.empty(x_RV.size, dtype=np.int64), np.empty(x_RV.size, dtype=np.uint32)
    x, keys, largest, found, bits = (each.ctypes.data for each in (x_RV, keys_R2, largest_R, indices, integers))
    count = native.lib.paceline_draw_candidates(x, *x_RV.shape, keys, largest, leniency, found, bits)
    return indices[:count], integers[:count]
