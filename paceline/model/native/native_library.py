"""The native library and its threads, and helpers for calling it."""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.native.build import native_library

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

    def run(self, function: str, handle: Pointer, *arguments: object) -> None:
        """Call `paceline_<function>` of a native object, in the threads of the pool."""
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
