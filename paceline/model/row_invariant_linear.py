"""Matrix products whose rows do not depend on the number of rows.

On a CPU with AMX, oneDNN has another bf16 kernel for 33 rows and more (sometimes later), which sums in another order:
a row's bits change. Up to 32 rows all agree (torch 2.13; widths 64 to 8192, one and two threads). So a product is split
into chunks of 32 rows there. Without AMX (`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`) products are as exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS_PER_PRODUCT = 32


def chunked_product(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The product of rows [R, in]. A row's bits do not depend on R."""
    if len(x) <= MAX_ROWS_PER_PRODUCT or x.dtype != torch.bfloat16 or not _depends_on_rows(x.device):
        return product(x)
    return torch.cat([product(chunk) for chunk in x.split(MAX_ROWS_PER_PRODUCT)])


def use_chunked_linear(network: nn.Module) -> None:
    """Make every linear layer of a network use chunks, in place, on a device that needs them."""
    for module in network.modules():
        if type(module) is nn.Linear and _depends_on_rows(module.weight.device):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    product = chunked_product(lambda chunk: F.linear(chunk, module.weight, module.bias), rows)
    return product.view(*x.shape[:-1], product.shape[-1])


def _depends_on_rows(device: torch.device) -> bool:
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())
