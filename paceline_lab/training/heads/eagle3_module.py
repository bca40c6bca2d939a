"""Training an EAGLE-3 head (Li et al. 2025): the tensors of the published format, and their "training-time test".

While it drafts, a head reads its own output of the previous row, not the target's states. So does training: step 0
reads the target's states, every later step the head's own output of the previous step, shifted by one token. Row i of
step s predicts the token at i + 2 + s. It attends to rows 0 to i of step 0, and to its own column in steps 1 to s.

Shapes: B rows, L positions, H hidden size, h that of the head, N heads, G heads of keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from paceline_lab.training.heads.chain_attention import ChainAttention, Past
from paceline_lab.training.heads.target_reader import TargetOutputs


class Eagle3Module(nn.Module):
    """The head. Its parameters are named as in the original uploads."""

    def __init__(self, config: LlamaConfig, states: int, output: Tensor) -> None:
        """`config`: of its one layer. `states`: number of target layers it reads. `output` [columns, h]: initial output
        matrix."""
        super().__init__()
        h = config.hidden_size
        self.fc = nn.Linear(states * h, h, bias=False)
        self.midlayer = _Eagle3Layer(config)
        self.norm = LlamaRMSNorm(h, config.rms_norm_eps)
        self.lm_head: nn.Linear | FixedLinear = nn.Linear(h, len(output), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(output)

    @torch.no_grad()
    def restrict(self, vocabulary: Tensor) -> None:
        """Keep the output columns of these tokens of the target alone: int64 [columns], rising. The buffers `d2t`, each
        column's token less its number, and `t2d`, which tokens have a column, are those of the uploads."""
        whole = self.lm_head.weight
        self.lm_head = nn.Linear(whole.shape[1], len(vocabulary), bias=False)
        self.lm_head.weight.copy_(whole[vocabulary])
        self.register_buffer("d2t", vocabulary - torch.arange(len(vocabulary)))
        self.register_buffer("t2d", torch.isin(torch.arange(len(whole)), vocabulary))

    def share_output(self) -> None:
        """Take the output matrix as it is: the target's, which is neither trained nor saved."""
        self.lm_head = FixedLinear(self.lm_head.weight.detach().clone())

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """Logits [B, L - 1 - s, columns] of each step s, for the tokens from 2 + s on and the one past the end."""
        x = self.fc(reading.states_BLSH.flatten(2)[:, :-1])
        past: Past = []
        logits = []
        for step in range(steps):
            x = self.midlayer(reading.embedded_BLH[:, 1 + step :], x[:, : x.shape[1] - (step > 0)], past)
            logits.append(self.lm_head(self.norm(x)))
        return logits


class FixedLinear(nn.Module):
    """A product with a matrix [out, in] that is no parameter."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Eagle3Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(h, eps)
        self.input_layernorm = LlamaRMSNorm(h, eps)
        self.self_attn = ChainAttention(config, 2 * h)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, tokens: Tensor, x: Tensor, past: Past) -> Tensor:
        both = torch.cat((self.input_layernorm(tokens), self.hidden_norm(x)), -1)
        x = x + self.self_attn(both, past)
        normed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + normed
