"""Compiles Triton kernels for an H100 where there is none, and says what became of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"},
    **{torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have."""


class Launch(NamedTuple):
    """A kernel's arguments by name, and what only its launch takes."""

    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


class Compiled(NamedTuple):
    """`shared`: bytes of shared memory. `spills`: bytes of registers. `products`: instructions for products. `fuses`:
    whether a float32 product and a sum are one operation, or the assembler may make them one."""

    shared: int
    spills: int
    products: frozenset[str]
    fuses: bool


class RecordedKernel:
    """Stands for a kernel: keeps its launches, and computes nothing."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            arguments = dict(zip(self._kernel.arg_names, given, strict=False)) | named
            options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
            self._launches.append(Launch(self._kernel, arguments, options))

        return launch


def compiled(launch: Launch, folder: Path) -> Compiled:
    """The kernel as this launch would compile it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants, aligned = launch.kernel, {}, {}, {}
    for n, parameter in enumerate(kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            types[name] = TYPES[value.dtype]
        elif value is None or parameter.is_constexpr:
            types[name], constants[(n,)] = "constexpr", value
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
        is_even = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if types[name] != "constexpr" and is_even and not parameter.do_not_specialize:
            aligned[(n,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=dict(launch.options)
    )
    code = made.asm["ptx"]
    source = folder / "kernel.ptx"
    source.write_text(code)
    command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
    products = frozenset(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.:]*", code))
    fuses = re.search(r"\b(?:fma\.rn|mul|add|sub)\.f32\b", code) is not None  # without a rounding it may be fused
    return Compiled(made.metadata.shared, spills, products, fuses)
