"""Attention for training a draft on its own outputs, several steps for every position at once.

Row i of step 0 has position i and attends to rows 0 to i of that step. Row i of a later step s has position i + s, and
attends to the same rows of step 0 and its own column in steps 1 to s, as it would while drafting.

Shapes: B rows, L positions, N heads, G heads of keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Past = list[tuple[Tensor, Tensor]]
"""Keys and values [B, G, L, D] of the steps so far."""


class ChainAttention(nn.Module):
    """Attention whose input may be wider than its output. Its parameters are named as in Llama."""

    def __init__(self, config: LlamaConfig, into: int) -> None:
        super().__init__()
        self._size = config.head_dim
        inner, keys = config.num_attention_heads * self._size, config.num_key_value_heads * self._size
        self.q_proj = nn.Linear(into, inner, bias=False)
        self.k_proj = nn.Linear(into, keys, bias=False)
        self.v_proj = nn.Linear(into, keys, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """The next step of the rows [B, L, into]; its keys and values are added to `past`."""
        return attended(self, x, past, self._rotary, self._size)


def attended(attention: Any, x: Tensor, past: Past, rotary: nn.Module, size: int) -> Tensor:
    """As `ChainAttention.forward`, with the projections of any module named as in Llama."""
    step, length = len(past), x.shape[1]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (project(x).unflatten(-1, (-1, size)).transpose(1, 2) for project in projections)
    positions = torch.arange(step, step + length, device=x.device)[None]
    query, key = apply_rotary_pos_emb(query, key, *rotary(x, positions))
    past.append((key, value))
    out: Tensor = attention.o_proj(attend(query, past).transpose(1, 2).flatten(2))
    return out


def attend(query: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention output [B, N, L, D] of the last step."""
    length, per_key = query.shape[2], query.shape[1] // past[0][0].shape[1]
    steps = [tuple(each[:, :, :length].repeat_interleave(per_key, 1) for each in pair) for pair in past]
    (first_key, first_value), later = steps[0], steps[1:]
    scale = query.shape[-1] ** -0.5
    future = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = [query @ first_key.transpose(-1, -2) * scale + future]
    scores += [(query * key).sum(-1, keepdim=True) * scale for key, _ in later]
    shares = torch.softmax(torch.cat(scores, -1).float(), -1).to(query.dtype)
    out = shares[..., :length] @ first_value
    for n, (_, value) in enumerate(later):
        out = out + shares[..., length + n, None] * value
    return out
