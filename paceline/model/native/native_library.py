"""The native library and its threads, helpers for calling it, and what takes a single call: products of one matrix, the
numbers of a quantised one, and the tokens that can win a draw."""

from __future__ import annotations

import ctypes
import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.layer_weights import QuantizedWeight, Weight
from paceline.model.native.build import NativeUnavailableError, native_library

LANES = 16
"""Inputs and outputs of products are padded to a multiple of this."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights, keys and values. Sums are float32."""
DENSE = -1
"""In place of a block type: numbers of the network's dtype."""
Pointer = ctypes.c_void_p


class NativeLibrary:
    """The native library and its threads: one instance per process, made at its first use."""

    _instance: NativeLibrary | None = None

    def __init__(self, threads: int) -> None:
        """Raises `NativeUnavailableError`."""
        lib = native_library()
        for name in ("thread_pool", "network", "product", "attention"):
            getattr(lib, f"paceline_{name}_create").restype = Pointer
            getattr(lib, f"paceline_{name}_destroy").argtypes = [Pointer]
        lib.paceline_network_create.argtypes = [Pointer, Pointer, Pointer]
        lib.paceline_network_run.argtypes = [Pointer, Pointer, Pointer]
        lib.paceline_network_output.argtypes = [Pointer, Pointer, Pointer, ctypes.c_int32, Pointer]
        lib.paceline_product_create.argtypes = [
            *(ctypes.c_int32, Pointer, ctypes.c_int32),
            *(Pointer, ctypes.c_int32, ctypes.c_int32, Pointer),
        ]
        lib.paceline_dequantise.argtypes = [ctypes.c_int32, Pointer, ctypes.c_int64, ctypes.c_int32, Pointer]
        lib.paceline_dequantise.restype = None
        lib.paceline_product_run.argtypes = [Pointer, Pointer, Pointer, ctypes.c_int32, Pointer]
        lib.paceline_attention_create.argtypes = [ctypes.c_int32] * 5
        lib.paceline_attention_run.argtypes = [Pointer] * 3
        lib.paceline_scan.argtypes = lib.paceline_convolution.argtypes = [Pointer] * 2
        lib.paceline_draw_candidates.argtypes = [
            Pointer,
            *[ctypes.c_int32] * 2,
            *[Pointer] * 2,
            ctypes.c_double,
            *[Pointer] * 2,
        ]
        lib.paceline_draw_candidates.restype = ctypes.c_int64
        self.lib = lib
        self._lock = threading.Lock()  # the pool runs one call at a time
        self.thread_pool = self.create(self, "thread_pool", ctypes.c_int32(threads))

    def create(self, owner: object, kind: str, *arguments: object) -> Pointer:
        """A new native object of this kind, which is destroyed with its owner."""
        handle = Pointer(getattr(self.lib, f"paceline_{kind}_create")(*arguments))
        weakref.finalize(owner, getattr(self.lib, f"paceline_{kind}_destroy"), handle)
        return handle

    def run(self, function: str, handle: object, *arguments: object) -> None:
        """Call `paceline_<function>` of a native object, or of a structure, in the threads of the pool."""
        with self._lock:
            getattr(self.lib, f"paceline_{function}")(handle, self.thread_pool, *arguments)

    @classmethod
    def instance(cls) -> NativeLibrary:
        """This process's instance, with as many threads as torch has. Raises `NativeUnavailableError`."""
        if cls._instance is None:
            cls._instance = cls(torch.get_num_threads())
        return cls._instance

    @classmethod
    def set_instance(cls, instance: NativeLibrary) -> None:
        """Replace the instance, for networks made later."""
        cls._instance = instance


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def padded_size(numbers: int) -> int:
    return -(-numbers // LANES) * LANES


def pad_columns(x: Tensor) -> Tensor:
    """[rows, n], padded with zeros to a multiple of LANES, contiguous."""
    missing = -x.shape[-1] % LANES
    return F.pad(x, (0, missing)) if missing else x.contiguous()


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
    x_RV: npt.NDArray[np.float32], keys_R2: npt.NDArray[np.uint32], largest_R: npt.NDArray[np.int64], leniency: float
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
