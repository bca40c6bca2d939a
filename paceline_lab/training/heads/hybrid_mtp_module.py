"""Training the layer for multi-token prediction of a Qwen3.5: `MtpModule`, with the target's own kind of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from paceline.drafting.methods.mtp import mtp_layer_config
from paceline_lab.training.heads.chain_attention import Past, attend
from paceline_lab.training.heads.mtp_module import mtp_logits
from paceline_lab.training.heads.target_reader import TargetOutputs


def begun_mtp(hybrid: Qwen3_5ForCausalLM, seed: int) -> HybridMtpModule:
    """A module in float32 that begins as the hybrid's last layer, which has to be one of attention, and its final norm.
    Its projection begins as the sum of both halves."""
    torch.manual_seed(seed)
    module = HybridMtpModule(hybrid.config)
    module.layers[0].load_state_dict(hybrid.model.layers[-1].state_dict())
    module.norm.load_state_dict(hybrid.model.norm.state_dict())
    with torch.no_grad():
        size = hybrid.config.hidden_size
        module.fc.weight.copy_(torch.eye(size).repeat(1, 2))
    return module


class HybridMtpModule(nn.Module):
    """Its parameters are named as in the target's checkpoint, after the prefix `mtp.`"""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        own: Any = mtp_layer_config(config, sparse=False)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(own, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps)
        self._rotary = Qwen3_5TextRotaryEmbedding(own)

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """See `Eagle3Module.forward`."""
        return mtp_logits(reading, steps, self._next)

    def _next(self, tokens: Tensor, states: Tensor, past: Past) -> Tensor:
        layer: Any = self.layers[0]
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(tokens), self.pre_fc_norm_hidden(states)), -1))
        x = x + self._attended(layer.self_attn, layer.input_layernorm(x), past)
        final: Tensor = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        return final

    def _attended(self, attention: Any, x: Tensor, past: Past) -> Tensor:
        """The next step of the rows: `attended`, with a gate, and norms of queries and keys."""
        step, length, size = len(past), x.shape[1], attention.head_dim
        query, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
        key, value = (project(x).unflatten(-1, (-1, size)) for project in (attention.k_proj, attention.v_proj))
        positions = torch.arange(step, step + length, device=x.device)[None]
        query, key = apply_rotary_pos_emb(
            attention.q_norm(query).transpose(1, 2),
            attention.k_norm(key).transpose(1, 2),
            *self._rotary(x, positions),
        )
        past.append((key, value.transpose(1, 2)))
        mixed = attend(query, past).transpose(1, 2).flatten(2)
        out: Tensor = attention.o_proj(mixed * gate.flatten(2).sigmoid())
        return out
