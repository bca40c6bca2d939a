"""Training an EAGLE-3 head (Li et al. 2025): the tensors of the published format, and their "training-time test".

While it drafts, a head is fed with what it made of the row before, not with the target's states. So it is trained that
way: step 0 reads the target's states, every later step its own output of the step before, moved on by one token. Row i
of step s predicts the token at i + 2 + s. It attends to rows 0 to i of step 0, and to its own column in steps 1 to s.

Shapes: B rows, L positions, H hidden size, h that of the head, N heads, G heads of keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from paceline.training.states import Reading


class Eagle3(nn.Module):
    """The head. Names of its parameters are those of the original uploads."""

    def __init__(self, config: LlamaConfig, states: int, output: Tensor) -> None:
        """`config`: of its one layer. `states`: how many layers of the target it reads. `output` [columns, h]: what its
        own output matrix begins as."""
        super().__init__()
        h = config.hidden_size
        self.fc = nn.Linear(states * h, h, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(h, config.rms_norm_eps)
        self.lm_head = nn.Linear(h, len(output), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(output)

    def forward(self, reading: Reading, steps: int) -> list[Tensor]:
        """Logits [B, L - 1 - s, columns] of each step s: of the tokens from 2 + s on, and of the one past the end."""
        x = self.fc(reading.states_BLSH.flatten(2)[:, :-1])
        past: list[tuple[Tensor, Tensor]] = []
        laws = []
        for step in range(steps):
            x = self.midlayer(reading.embedded_BLH[:, 1 + step :], x[:, : x.shape[1] - (step > 0)], past)
            laws.append(self.lm_head(self.norm(x)))
        return laws


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(h, eps)
        self.input_layernorm = LlamaRMSNorm(h, eps)
        self.self_attn = ChainAttention(config, 2 * h)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, tokens: Tensor, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat((self.input_layernorm(tokens), self.hidden_norm(x)), -1)
        x = x + self.self_attn(both, past)
        normed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + normed


class ChainAttention(nn.Module):
    """Attention of a head over what it made in the steps before. Its input may be wider than its output."""

    def __init__(self, config: LlamaConfig, into: int) -> None:
        super().__init__()
        self._size, self._heads, self._groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        inner = self._heads * self._size
        self.q_proj = nn.Linear(into, inner, bias=False)
        self.k_proj = nn.Linear(into, self._groups * self._size, bias=False)
        self.v_proj = nn.Linear(into, self._groups * self._size, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`past`: keys and values [B, G, L, D] of the steps before; this step's are added."""
        step, length = len(past), x.shape[1]
        query, key, value = (self._split(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(step, step + length, device=x.device)[None]
        query, key = apply_rotary_pos_emb(query, key, *self._rotary(x, positions))
        past.append((key, value))
        attended: Tensor = self.o_proj(_attend(query, past).transpose(1, 2).flatten(2))
        return attended

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self._size))
        return heads.transpose(1, 2)


def _attend(query: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Row i of the last step over rows 0 to i of step 0 and row i of the others: query [B, N, L, D], the same out."""
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
