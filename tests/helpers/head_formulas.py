"""What EAGLE heads compute, as their papers and reference programs have it: whole sequences without a cache.

Tensors go by the names of the original uploads. Row i is that of the token at position i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Embeddings [n, h] and features [n, h] to logits [n, columns] and the features of the next rows, [n, h]."""


@dataclass(frozen=True)
class Shape:
    """Of one decoder layer, with what its configuration has in addition to the sizes."""

    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-6
    theta: float = 10000.0
    linear: float = 1.0
    """Positions are divided by this."""
    frequencies: Tensor | None = None
    """[head size / 2]: instead of those of `theta`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, shape: Shape) -> Tensor:
    """[n, heads, D]: number j of a head turns with number j + D / 2, row i by i times their frequency."""
    half = x.shape[-1] // 2
    frequencies = shape.theta ** -(torch.arange(half) / half) if shape.frequencies is None else shape.frequencies
    angle = torch.arange(len(x))[:, None, None] / shape.linear * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def attention(x: Tensor, tensors: Tensors, name: str, shape: Shape) -> Tensor:
    """Every row over itself and those before."""

    def projected(which: str, heads: int) -> Tensor:
        y = x @ tensors[f"{name}.{which}_proj.weight"].T + tensors.get(f"{name}.{which}_proj.bias", torch.zeros(()))
        y = y.view(len(x), heads, -1)
        norm = tensors.get(f"{name}.{which}_norm.weight")
        return y if norm is None else rms_norm(y, norm, shape.eps)

    query = rotated(projected("q", shape.heads), shape)
    key = rotated(projected("k", shape.kv_heads), shape)
    value = projected("v", shape.kv_heads)
    out = []
    for head in range(shape.heads):
        of = head * shape.kv_heads // shape.heads
        scores = query[:, head] @ key[:, of].T / query.shape[-1] ** 0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, of])
    joined = torch.cat(out, -1)
    return joined @ tensors[f"{name}.o_proj.weight"].T + tensors.get(f"{name}.o_proj.bias", torch.zeros(()))


def mlp(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    gate, up = (x @ tensors[f"{name}.{which}_proj.weight"].T for which in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ tensors[f"{name}.down_proj.weight"].T


def second_half(x: Tensor, tensors: Tensors, name: str, shape: Shape) -> Tensor:
    return x + mlp(rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], shape.eps), tensors, f"{name}.mlp")


def plain_layer(x: Tensor, tensors: Tensors, name: str, shape: Shape) -> Tensor:
    """A Llama's; without a norm before the attention if there is no tensor for it."""
    norm = tensors.get(f"{name}.input_layernorm.weight")
    into = x if norm is None else rms_norm(x, norm, shape.eps)
    return second_half(x + attention(into, tensors, f"{name}.self_attn", shape), tensors, name, shape)


@dataclass(frozen=True)
class Eagle1:
    """EAGLE-1 and -2, over a target's matrices [V, h]."""

    tensors: Tensors
    embedding: Tensor
    output: Tensor
    shape: Shape = Shape()

    def encode(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        t, eps = self.tensors, self.shape.eps
        e = t.get("embed_tokens.weight", self.embedding)[list(tokens)]
        if "embed_layernorm.weight" in t:
            e = rms_norm(e, t["embed_layernorm.weight"], eps)
        x = torch.cat((e, features), -1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(()))
        x = plain_layer(x, t, "layers.0", self.shape)
        final = rms_norm(x, t["lm_head_layernorm.weight"], eps) if "lm_head_layernorm.weight" in t else x
        return final @ self.output.T, x


@dataclass(frozen=True)
class Eagle3:
    """EAGLE-3, over a target's matrices [V, H], which are used where the head has none of its own."""

    tensors: Tensors
    embedding: Tensor
    output: Tensor
    shape: Shape = Shape()
    ids: Sequence[int] | None = None
    """The target's token of each column, where the head has no output matrix of its own."""
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    others: Sequence[str] = field(default_factory=list)
    """Names of the layers after the first."""

    def encode(self, states: Tensor) -> Tensor:
        t, eps = self.tensors, self.shape.eps
        parts = list(states.unbind(1))
        if "fc_norm.0.weight" in t:
            parts = [rms_norm(part, t[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        a = torch.cat(parts, -1)
        if "input_norm.weight" in t:
            a = rms_norm(a, t["input_norm.weight"], eps)
        return a @ t["fc.weight"].T if "fc.weight" in t else a

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        t, eps = self.tensors, self.shape.eps
        e = rms_norm(
            t.get("embed_tokens.weight", self.embedding)[list(tokens)], t["midlayer.input_layernorm.weight"], eps
        )
        u = rms_norm(features, t["midlayer.hidden_norm.weight"], eps)
        x = u if self.norm_before_residual else features
        x = x + attention(torch.cat((e, u), -1), t, "midlayer.self_attn", self.shape)
        x = second_half(x, t, "midlayer", self.shape)
        for name in self.others:
            x = plain_layer(x, t, name, self.shape)
        final = rms_norm(x, t["norm.weight"], eps)
        matrix = t.get("lm_head.weight", self.output if self.ids is None else self.output[list(self.ids)])
        return final @ matrix.T * self.logit_scale, final if self.norm_output else x


Formula = Eagle1 | Eagle3


def after(formula: Formula, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of the last row of `tokens` and then of a path of guesses: logits and feature, one row after the other.

    `tokens` are all of a request; `states` [layers, H] of all but the last of them.
    """
    features = formula.encode(states)
    inputs = list(tokens[1:])
    logits, fed_back = formula(inputs, features)
    for guess in path:
        features = torch.cat((features, fed_back[-1:]))
        inputs.append(guess)
        logits, fed_back = formula(inputs, features)
    return logits[-1], fed_back[-1]
