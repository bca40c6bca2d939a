"""What Medusa heads and MLP speculators compute, as their papers and reference programs have it: state by state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.helpers.llamas import VOCABULARY

Tensors = Mapping[str, Tensor]


def medusa_logits(tensors: Tensors, states: Tensor, output: Tensor | None = None, count: int = 1) -> Tensor:
    """[n, heads, V], by the original's names; -inf for tokens without a row. `output`: of all heads, if it is one.
    `count`: layers per head."""
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    logits = torch.full((len(states), heads, VOCABULARY), -math.inf)
    for n, head in itertools.product(range(len(states)), range(heads)):
        z = states[n]
        for layer in range(count):
            a = tensors[f"{head}.{layer}.linear.weight"] @ z + tensors[f"{head}.{layer}.linear.bias"]
            z = z + a / (1 + torch.exp(-a))
        matrix = tensors[f"{head}.{count}.weight"] if output is None else output
        logits[n, head, : len(matrix)] = matrix @ z
    return logits


def mlp_logits(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int, *, scale: bool = False) -> Tensor:
    """Logits after the root and each further token, [tokens, head's rows], by IBM's names. `trained`: n_predict."""
    ratio = embedding_ratio(trained, len(tensors["ln.0.weight"]))
    s = state / torch.sqrt((state * state).mean() + 1e-6) / math.sqrt(2) if scale else state
    logits = []
    for i, token in enumerate(tokens):
        s = tensors[f"proj.{i}.weight"] @ s + ratio * tensors[f"emb.{i}.weight"][token]
        s = gelu(norm(s, tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"]))
        logits.append(tensors[f"head.{i}.weight"] @ s)
    return torch.stack(logits)


def lstm_logits(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int) -> Tensor:
    """The same for Arctic's `sum_lstm`."""
    inner = len(tensors["state_ln.0.weight"])
    ratio = embedding_ratio(trained, inner)
    s, c = state, torch.zeros(inner)
    logits = []
    for i, token in enumerate(tokens):
        a = tensors[f"projs.{min(i, 1)}.weight"] @ s + ratio * tensors["forget_emb.0.weight"][token].repeat(4)
        forget, into, out, candidate = a[:inner], a[inner : 2 * inner], a[2 * inner : 3 * inner], a[3 * inner :]
        candidate = gelu(norm(candidate, tensors["cell_ln.0.weight"], tensors["cell_ln.0.bias"]))
        c = c * torch.sigmoid(forget) + candidate * torch.sigmoid(into)
        s = gelu(norm(c, tensors["state_ln.0.weight"], tensors["state_ln.0.bias"])) * torch.sigmoid(out)
        logits.append(tensors["head.0.weight"] @ s)
    return torch.stack(logits)


def embedding_ratio(trained: int, inner: int) -> float:
    state_weight = 0.5 ** (0.5 / trained)
    return math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight + bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
