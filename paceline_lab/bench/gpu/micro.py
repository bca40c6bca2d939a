"""What the machine can do, and the products of an 8B pass: their time and their bits by the number of rows.

`copy_gb_s`: bytes read and written by a copy. `launch_us`: a small kernel, started from Python and in a graph. For each
setting of the matrix library `products` has microseconds by matrix and rows, and the row counts at which the first
eight or the last eight rows have other bits than these eight rows alone. `quantized`: the library's products with
packed weights, or why there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_lab.bench.gpu.device_times import Work, copy_bytes_per_s, device_us, launch_us
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, shape_for

ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CACHED_BYTES = {"cuda": 2**28, "cpu": 1}
"""Products take turns with copies of their matrix until all copies have this many bytes: caches hold fewer."""
COPIES = 4
"""The same for packed matrices."""
REASON = 100
"""Characters of an error."""
SMALL_KERNELS = 200
FEW = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """How products are computed: variables that the matrix library reads once, and switches."""

    environment: Mapping[str, str] = field(default_factory=dict)
    without_split: bool = False
    """Without sums in parts (split-K), by cuBLASLt."""

    def apply(self, device: torch.device) -> None:
        os.environ.update(self.environment)
        if device.type == "cuda" and self.without_split:
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


SETTINGS = {
    "default": Setting(),
    "no split-K": Setting(without_split=True),
    "small workspace": Setting({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
}


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    yield {"copy_gb_s": round(copy_bytes_per_s(device) / 1e9, 1)}
    number = torch.zeros(1, device=device)
    works: list[Work] = [partial(number.add_, 1.0)] * SMALL_KERNELS
    yield {"launch_us": {"python": round(launch_us(works, device), 2), "graph": round(device_us(works, device), 2)}}
    for name, setting in SETTINGS.items():  # in a process each: the library reads its settings once
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            yield {f"products, {name}": process.submit(products, setting, device).result()}
    yield {"quantized": quantized(device)}


def matrices(device: torch.device) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of an 8B model's pass."""
    shape = shape_for(LLAMA_8B, device)
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    return {
        "qkv": (queries + 2 * keys, hidden),
        "o": (hidden, queries),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocab_size"], hidden),
    }


@torch.inference_mode()
def products(setting: Setting, device: torch.device) -> dict[str, Any]:
    """By matrix: microseconds by rows, and row counts with other bits."""
    setting.apply(device)
    found: dict[str, Any] = {}
    for name, (outputs, inputs) in matrices(device).items():
        weights = _copies(outputs, inputs, device)
        rows = torch.randn(ROWS[-1], inputs, dtype=torch.bfloat16, device=device)
        us = {m: round(device_us([partial(F.linear, rows[:m], each) for each in weights], device), 2) for m in ROWS}
        found[name] = {"us": us, "other_bits": other_bits(lambda part: F.linear(part, weights[0]), rows)}  # noqa: B023
    return found


def other_bits(product: Callable[[Tensor], Tensor], rows: Tensor) -> list[int]:
    """The ROWS at which the first or the last FEW rows differ from the product of these alone."""
    differ = []
    for count in ROWS:
        together = product(rows[:count])
        ends = ((rows[:FEW], together[:FEW]), (rows[count - FEW : count], together[count - FEW :]))
        if not all(torch.equal(product(alone), part) for alone, part in ends):
            differ.append(count)
    return differ


def _copies(outputs: int, inputs: int, device: torch.device) -> list[Tensor]:
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    return [weight, *(weight.clone() for _ in range(CACHED_BYTES[device.type] // weight.nbytes))]


@torch.inference_mode()
def quantized(device: torch.device) -> dict[str, Any]:
    """Microseconds of `gate_up` and `down` by kind and rows."""
    found: dict[str, Any] = {}
    for name in ("gate_up", "down"):
        for kind, make in KINDS.items():
            for rows in (8, 64):
                try:
                    works = [make(rows, *matrices(device)[name], device) for _ in range(COPIES)]
                    us: float | str = round(device_us(works, device), 2)
                except (RuntimeError, AttributeError, ValueError) as error:
                    us = str(error)[:REASON]
                found[f"{kind}, {name}, {rows} rows"] = us
    return found


def _fp8(rows: int, outputs: int, inputs: int, device: torch.device, *, by_row: bool) -> Work:
    row = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn).T
    shapes = ((rows, 1), (1, outputs)) if by_row else ((), ())
    by_rows, by_outputs = (torch.ones(shape, device=device) for shape in shapes)
    return partial(torch._scaled_mm, row, weight, scale_a=by_rows, scale_b=by_outputs, out_dtype=torch.bfloat16)


def _int8(rows: int, outputs: int, inputs: int, device: torch.device) -> Work:
    """With rows up to 32, because the library takes no fewer than 17."""
    row = torch.randint(-9, 9, (max(32, rows), inputs), dtype=torch.int8, device=device)
    return partial(torch._int_mm, row, torch.randint(-9, 9, (outputs, inputs), dtype=torch.int8, device=device).T)


def _int4(rows: int, outputs: int, inputs: int, device: torch.device) -> Work:
    row = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    codes = torch.randint(0, 255, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.ones(inputs // 128, outputs, 2, dtype=torch.bfloat16, device=device)
    packed = torch._convert_weight_to_int4pack(codes, 8)
    return partial(torch._weight_int4pack_mm, row, packed, 128, scales)


KINDS: Mapping[str, Callable[[int, int, int, torch.device], Work]] = {
    "fp8 by matrix": partial(_fp8, by_row=False),
    "fp8 by row": partial(_fp8, by_row=True),
    "int8": _int8,
    "int4": _int4,
}
