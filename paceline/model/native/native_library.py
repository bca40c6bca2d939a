"""The native library and the threads that work in it; what its callers share."""

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
"""Of weights, keys and values. Sums are float32."""
Pointer = ctypes.c_void_p


class NativeLibrary:
    """The native library and the threads that work in it: one of each in a process, made when first needed."""

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
        lib.paceline_product_create.argtypes = [ctypes.c_int32, Pointer, Pointer, *[ctypes.c_int32] * 2, Pointer]
        lib.paceline_product_run.argtypes = [Pointer, Pointer, Pointer, ctypes.c_int32, Pointer]
        lib.paceline_attention_create.argtypes = [ctypes.c_int32] * 4
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
        self.lock = threading.Lock()
        """Held during a call: the pool does one thing at a time, and Python's other threads go on meanwhile."""
        self.thread_pool = Pointer(lib.paceline_thread_pool_create(ctypes.c_int32(threads)))
        weakref.finalize(self, lib.paceline_thread_pool_destroy, self.thread_pool)

    @classmethod
    def instance(cls) -> NativeLibrary:
        """With as many threads as torch has. Raises `NativeUnavailableError`."""
        if cls._instance is None:
            cls._instance = cls(torch.get_num_threads())
        return cls._instance

    @classmethod
    def set_instance(cls, instance: NativeLibrary) -> None:
        """From now on, for what is made from now on."""
        cls._instance = instance


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def padded_size(numbers: int) -> int:
    return -(-numbers // LANES) * LANES


def pad_columns(x: Tensor) -> Tensor:
    """[rows, n] with zeros up to a multiple of LANES, contiguous."""
    missing = -x.shape[-1] % LANES
    return F.pad(x, (0, missing)) if missing else x.contiguous()
