"""What a model's numbers depend on, apart from its weights."""

from __future__ import annotations

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


def numerics_of(model: TransformersModel, quantization: str) -> str:
    """One line, such as "native avx512, g++ 12.2.0, source 1a2b3c4d; float32; cpu; torch 2.13.0 AVX512; ...".

    Equal lines mean equal bits, given the same weights and rows. The native pass sums in one order on every machine
    with its instruction set. Torch's libraries choose kernels by the CPU, and may split sums among threads: MKL does in
    float32, unless `MKL_CBWR` is STRICT (32 rows of 8,192 numbers, torch 2.13).
    `quantization`: of the weights, such as `quantization_of` gives.
    """
    device = model.device
    path = f"native {native_description()}" if model.native else "torch operators"
    if model.has_native_attention and not model.native:
        path += f", native attention {native_description()}"
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
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS))
    return f"cpu {cpu_name()}, instructions {_digest(' '.join(flags))}"


def cpu_name() -> str:
    """From /proc/cpuinfo, else "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
