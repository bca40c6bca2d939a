"""Matrix products whose rows do not depend on how many there are.

On a CPU with AMX, oneDNN multiplies bf16 by another kernel from 33 rows on (sometimes later), which sums in another
order: the same row has other bits then. Up to 32 rows all agree (torch 2.13; widths 64 to 8192, one thread and two). So
there a product is made of pieces of 32 rows. Doing without AMX (`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`) is as exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS_PER_PRODUCT = 32
"""Rows."""


def chunked_product(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A product of rows [R, in], row for row the same whatever R is."""
    if len(x) <= MAX_ROWS_PER_PRODUCT or x.dtype != torch.bfloat16 or not _depends_on_rows(x.device):
        return product(x)
    return torch.cat([product(piece) for piece in x.split(MAX_ROWS_PER_PRODUCT)])


def use_chunked_linear(network: nn.Module) -> None:
    """Let every linear layer of a network multiply like that, in place, where it would not by itself."""
    for module in network.modules():
        if type(module) is nn.Linear and _depends_on_rows(module.weight.device):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    product = chunked_product(lambda piece: F.linear(piece, module.weight, module.bias), rows)
    return product.view(*x.shape[:-1], product.shape[-1])


def _depends_on_rows(device: torch.device) -> bool:
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())
