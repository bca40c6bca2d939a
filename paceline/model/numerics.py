"""What a model's numbers depend on, apart from its weights."""

from __future__ import annotations

import ctypes
import json
import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.model.model import TransformersModel
from paceline.model.native.build import cpu_flags, native_description

VECTORS = ("sse", "avx", "amx", "fma", "f16c")
"""Prefixes of the CPU flags that torch's libraries choose kernels by."""
VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that change that choice."""
GPU_VARIABLES = ("CUBLAS", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TORCH_BLAS_PREFER", "DISABLE_ADDMM_CUDA_LT")
"""Beginnings of the names of environment variables that change what cuBLAS, or torch for it, chooses on a GPU."""
MAPS = Path("/proc/self/maps")


def numerics_of(model: TransformersModel, quantization: str) -> str:
    """One line, such as "native avx512, g++ 12.2.0, source 1a2b3c4d; float32; cpu; torch 2.13.0 AVX512; ...".

    Equal lines mean equal bits, given the same weights and rows. The native pass sums in one order on every machine
    with its instruction set. Torch's libraries choose kernels by the CPU, and may split sums among threads: MKL does in
    float32, unless `MKL_CBWR` is STRICT (32 rows of 8,192 numbers, torch 2.13). cuBLAS chooses kernels, and whether to
    split sums, by its version, its variables and torch's settings.
    `quantization`: of the weights, such as `quantization_of` gives.
    """
    device = model.device
    path = f"native {native_description()}" if model.native else "torch operators"
    if model.has_native_attention and not model.native:
        what = "attention and products" if model.has_native_products else "attention"
        path += f", native {what} {native_description()}"
    if model.cache.attention_name:
        path += f", {model.cache.attention_name}"
    if device.type == "cpu" and not model.native:
        settings = [f"threads={torch.get_num_threads()}"]
        settings += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
        path = ", ".join([path, *settings])
    parts = [
        path,
        str(model.dtype).removeprefix("torch.") + quantization + (", int8 cache" if model.cache.is_int8 else ""),
        device.type if model.native else _device(device),
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",  # torch draws tokens on every path
        f"transformers {version('transformers')}",
        f"paceline {__version__}",
    ]
    return "; ".join(parts)


def quantization_of(config: Any) -> str:
    """The quantization method in transformers' configuration and a hash of its parameters; empty without one."""
    settings = config.to_dict().get("quantization_config")
    if not settings:
        return ""
    text = json.dumps(settings, sort_keys=True, default=str)
    return f" {json.loads(text)['quant_method']} {_digest(text)}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return ", ".join((f"cuda {torch.cuda.get_device_name(device)}", *_matrix_products()))
    if device.type != "cpu":
        return device.type
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS))
    return f"cpu {cpu_name()}, instructions {_digest(' '.join(flags))}"


def _matrix_products() -> list[str]:
    """The library for products on a GPU, and all that its choices depend on: torch's settings and variables."""
    settings = torch.backends.cuda.matmul
    library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    reduced = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    split = [  # without the setting, before torch 2.11, sums may be split
        getattr(settings, f"allow_{dtype}_reduced_precision_reduction_split_k", True) for dtype in ("bf16", "fp16")
    ]
    flags = "".join(str(int(flag)) for flag in (*reduced, *split, settings.allow_fp16_accumulation))
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(GPU_VARIABLES)]
    return [_cublas(), f"{library} {flags} {settings.fp32_precision}", *variables]


def _cublas() -> str:
    """cuBLAS as this process has loaded it."""
    lines = MAPS.read_text(encoding="utf-8").splitlines() if MAPS.is_file() else []
    files = [path for *_, path in (line.split(maxsplit=5) for line in lines) if "/libcublasLt.so" in path]
    if not files:
        return f"cuBLAS of CUDA {torch.version.cuda}"
    version = ctypes.CDLL(files[0]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return f"cuBLASLt {version()}"


def cpu_name() -> str:
    """From /proc/cpuinfo, else "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
