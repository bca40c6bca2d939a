"""Layers of the Llama kind over rows, in few operators: joined projections, one-operator norms, rotary tables.

What a decoder and the heads that draft for it are built from. Weights are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import Heads, Pass, attend
from paceline.model.products import in_pieces
from paceline.model.rows import GROUP

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of each row's position, [R, 1, D]."""
Product = Callable[[Tensor], Tensor]
"""A matrix product of rows, [R, in] → [R, out]: a `Linear`, or what makes one of the parts of several processes."""


class Norm:
    """RMSNorm as one operator."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class Linear:
    """One product for several projections of the same input.

    On a CPU the weight is laid out once for oneDNN, as torch's own compiler does. In bf16 the result is the same bit
    for bit; in fp32 it, too, does not depend on the number of rows, nor on where the weight lies in memory.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """Weights [out, in], one below the other; there are biases for all of them or none."""
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # one alone is not copied
        self._bias: Tensor | None = torch.cat(list(biases)) if biases else None
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, GROUP) if self._packed else weight

    @classmethod
    def of(cls, *modules: Any) -> Linear:
        """The same as these `nn.Linear`."""
        biases = () if modules[0].bias is None else [module.bias for module in modules]
        return cls(*(module.weight for module in modules), biases=biases)

    def __call__(self, x: Tensor) -> Tensor:
        return in_pieces(self._product, x)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)


class Rotary:
    """Rotary position embedding (Su et al. 2021), half-split, by tables of all positions."""

    def __init__(self, module: Any, positions: int, like: Tensor) -> None:
        """`module`: a transformers rotary embedding. `like`: a tensor of the wanted dtype and device."""
        cos, sin = module(like, torch.arange(positions, device=like.device).unsqueeze(0))
        half = cos.shape[-1] // 2
        # [positions, 1, D]: x * cos + swap_halves(x) * sin rotates, with the sign of the first half in the table.
        self._cos = cos[0].unsqueeze(1)
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)

    def __call__(self, positions: Tensor) -> Turn:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Heads [R, heads, D], each row rotated to its position."""
    cos, sin = turn
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention:
    """Grouped-query attention of one layer. Its input may be wider than its output."""

    def __init__(
        self,
        index: int,
        heads: Heads,
        into: Product,
        out: Product,
        *,
        scale: float,
        window: int = 0,
        head_norms: tuple[Tensor, float] | None = None,
    ) -> None:
        """`into` gives queries, keys and values. `head_norms`: Qwen3's, [query heads + key heads, D], and their eps."""
        self._index, self._heads = index, heads
        self._into, self._out = into, out
        self._scale, self._window = scale, window
        self._head_norms = head_norms

    def __call__(self, x: Tensor, turn: Turn, this: Pass) -> Tensor:
        heads = self._heads
        queries = heads.kv_heads * heads.queries_per_kv
        rotated = queries + heads.kv_heads
        projected = self._into(x).view(x.shape[0], rotated + heads.kv_heads, heads.head_size)
        qk = projected[:, :rotated]
        if self._head_norms is not None:
            weight, eps = self._head_norms
            qk = F.rms_norm(qk, (heads.head_size,), None, eps) * weight
        qk = turned(qk, turn)
        query, key, value = qk[:, :queries], qk[:, queries:], projected[:, rotated:]
        return self._out(attend(query, key, value, self._index, this, self._scale, self._window))


class SwiGLU:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, gate_up: Product, down: Product) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)


def joined_head_norms(heads: Heads, query: Tensor, key: Tensor, eps: float) -> tuple[Tensor, float]:
    """Weights [D] of the norms of query and key heads, as `Attention` takes them."""
    queries = heads.kv_heads * heads.queries_per_kv
    return torch.cat([query.expand(queries, -1), key.expand(heads.kv_heads, -1)]), eps
