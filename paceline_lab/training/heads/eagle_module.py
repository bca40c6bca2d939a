"""Training an EAGLE-1 head on its own outputs (HASS, Zhang et al. 2024).

See `paceline_lab.training.heads.eagle3_module` for the steps; the target's output matrix reads the head's output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from paceline_lab.training.heads.chain_attention import ChainAttention, Past
from paceline_lab.training.heads.target_reader import TargetOutputs


class EagleModule(nn.Module):
    """The head. Its parameters are named as in the original uploads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([_EagleLayer(config)])
        with torch.no_grad():  # the states to imitate resemble the input states
            self.fc.weight.mul_(0.5)[:, h:].add_(torch.eye(h), alpha=0.5)

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """See `Eagle3Module.forward`."""
        x = reading.states_BLSH[:, :-1, 0]
        past: Past = []
        logits = []
        for step in range(steps):
            tokens = reading.embedded_BLH[:, 1 + step :]
            x = self.layers[0](self.fc(torch.cat((tokens, x[:, : tokens.shape[1]]), -1)), past)
            logits.append(reading.projected(x))
        return logits


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
