"""Reference decoder layers, over whole sequences and without a cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 64, 96, 4, 2, 16
"""Sizes of every draft that tests build; `SIZE` is the head size."""
EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def mlp(x: Tensor, tensors: Tensors, layer: str) -> Tensor:
    gate, up, down = (tensors[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rotated(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate [n, heads, SIZE]; the halves of a head are real and imaginary parts."""
    frequency = theta ** (-torch.arange(0, SIZE, 2) / SIZE)
    angle = positions[:, None, None] * frequency
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def heads_of(x: Tensor, tensors: Tensors, name: str, positions: Tensor | None = None) -> Tensor:
    """Project to [n, heads, SIZE]; norm if there is a norm, rotate if there are positions."""
    y = x @ tensors[f"{name}_proj.weight"].T
    y = y + tensors[f"{name}_proj.bias"] if f"{name}_proj.bias" in tensors else y
    y = y.view(len(x), -1, SIZE)
    y = rms_norm(y, tensors[f"{name}_norm.weight"]) if f"{name}_norm.weight" in tensors else y
    return y if positions is None else rotated(y, positions)


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Attend queries [m, HEADS, SIZE] to n keys: [m, HEADS * SIZE]. `seen`: a mask [m, n]."""
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = torch.einsum("mhd,nhd->hmn", query, key) / SIZE**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, value).flatten(1)


def layer_tensors(name: str, width: int = HIDDEN, *, head_norms: bool = False) -> dict[str, Tensor]:
    """Random weights of one layer whose attention takes inputs of this width."""
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * SIZE, width),
        "self_attn.k_proj.weight": (KV_HEADS * SIZE, width),
        "self_attn.v_proj.weight": (KV_HEADS * SIZE, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (SIZE,), "self_attn.k_norm.weight": (SIZE,)}
    return {f"{name}.{key}": random(*shape) for key, shape in shapes.items()}


def random(*shape: int) -> Tensor:
    """A norm's weights, around 1, or a matrix whose output has about the scale of its input."""
    return torch.randn(shape) * 0.2 + 1 if len(shape) == 1 else torch.randn(shape) * 1.5 / shape[-1] ** 0.5
