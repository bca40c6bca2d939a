"""Training a layer for multi-token prediction (DeepSeek-V3, 2024) for a target without one.

One module for every depth, which reads its own output of the previous token. See
`paceline_lab.training.heads.eagle3_module` for the steps; the target's output matrix reads the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from paceline_lab.training.heads.chain_attention import ChainAttention, Past
from paceline_lab.training.heads.target_reader import TargetOutputs


class MtpModule(nn.Module):
    """Its parameters are named as in the speculators library, after the prefix `mtp_layers.0.`"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(h, eps)
        self.hidden_layernorm = LlamaRMSNorm(h, eps)
        self.input_proj = nn.Linear(2 * h, h, bias=False)
        self.input_layernorm = LlamaRMSNorm(h, eps)
        self.self_attn = ChainAttention(config, h)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.mlp = LlamaMLP(config)
        self.final_layernorm = LlamaRMSNorm(h, eps)

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """See `Eagle3Module.forward`."""
        return mtp_logits(reading, steps, self._next)

    def _next(self, tokens: Tensor, states: Tensor, past: Past) -> Tensor:
        x = self.input_proj(torch.cat((self.token_layernorm(tokens), self.hidden_layernorm(states)), -1))
        x = x + self.self_attn(self.input_layernorm(x), past)
        final: Tensor = self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))
        return final


def mtp_logits(reading: TargetOutputs, steps: int, layer: Callable[[Tensor, Tensor, Past], Tensor]) -> list[Tensor]:
    """Of each step, as `Eagle3Module.forward`. `layer`: of embedded tokens and of states, [B, L, H], the output."""
    y = reading.states_BLSH[:, :-1, 0]
    past: Past = []
    logits = []
    for step in range(steps):
        tokens = reading.embedded_BLH[:, 1 + step :]
        y = layer(tokens, y[:, : tokens.shape[1]], past)
        logits.append(reading.projected(y))
    return logits
