"""What the numbers of a model depend on, beside its weights."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline import __version__
from paceline.model.decoder import Decoder
from paceline.model.native.build import cpu_flags, native_description

VECTORS = ("sse", "avx", "amx", "fma", "f16c")
"""How CPU flags begin by which torch's libraries choose their kernels."""
VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Of the environment, by which they are told to choose others."""


def numerics_of(decoder: Decoder, config: Any) -> str:
    """One line, such as "native avx512, g++ 12.2.0, source 1a2b3c4d; float32; cpu; torch 2.13.0 AVX512; ...".

    Equal lines stand for equal bits, given the same weights and rows. The native pass sums in one order on every
    machine with its instruction set. Torch's libraries choose kernels by the CPU, and may split sums among threads: in
    float32 MKL does, unless `MKL_CBWR` says STRICT (32 rows of 8,192 numbers, torch 2.13).
    `config`: the network's own, in transformers' format.
    """
    device = decoder.cache.device
    path = f"native {native_description()}" if decoder.native else "torch operators"
    if decoder.has_native_attention and not decoder.native:
        path += f", native attention {native_description()}"
    if device.type == "cpu" and not decoder.native:
        settings = [f"threads={torch.get_num_threads()}"]
        settings += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
        path = ", ".join([path, *settings])
    parts = [
        path,
        str(decoder.cache.dtype).removeprefix("torch.") + _quantisation(config),
        device.type if decoder.native else _device(device),
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",  # draws are made by torch on every path
        f"transformers {transformers.__version__}",
        f"paceline {__version__}",
    ]
    return "; ".join(parts)


def _quantisation(config: Any) -> str:
    """Its method, and a hash of its parameters; empty without one."""
    given = config.to_dict().get("quantization_config")
    if not given:
        return ""
    text = json.dumps(given, sort_keys=True, default=str)
    return f" {json.loads(text)['quant_method']} {_digest(text)}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS))
    return f"cpu {_cpu_name()}, instructions {_digest(' '.join(flags))}"


def _cpu_name() -> str:
    """As the system tells it; else "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
