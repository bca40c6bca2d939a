"""Training an EAGLE-1 head, taught by what it makes itself (HASS, Zhang et al. 2024).

See `paceline_lab.training.heads.eagle3_module` for the steps; the target's output matrix reads what the head makes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from paceline_lab.training.heads.chain_attention import ChainAttention, Past
from paceline_lab.training.heads.target_reader import TargetOutputs


class EagleModule(nn.Module):
    """The head. Names of its parameters are those of the original uploads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([_EagleLayer(config)])
        with torch.no_grad():  # what it is to imitate is much like what it is fed with
            self.fc.weight.mul_(0.5)[:, h:].add_(torch.eye(h), alpha=0.5)

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """See `Eagle3.forward`."""
        x = reading.states_BLSH[:, :-1, 0]
        past: Past = []
        laws = []
        for step in range(steps):
            tokens = reading.embedded_BLH[:, 1 + step :]
            x = self.layers[0](self.fc(torch.cat((tokens, x[:, : tokens.shape[1]]), -1)), past)
            laws.append(reading.projected(x))
        return laws


class _EagleLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = ChainAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = x + self.self_attn(x, past)
        changed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + changed
