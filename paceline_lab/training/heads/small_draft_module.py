"""Training a small model to draft: token by token, or several tokens at once (PARD, An et al. 2025).

For PARD, positions of unknown tokens hold a mask token. Step 0 reads the tokens; step s reads the mask, s positions
further, and predicts the token after it. All steps of all positions are trained at once (`chain_attention`), where
the paper packs sequences with masks and drops some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline_lab.training.heads.chain_attention import Past, attended
from paceline_lab.training.heads.target_reader import TargetOutputs


class SmallDraftModule(nn.Module):
    """A Llama initialised with the target's embedding, output matrix and final norm."""

    def __init__(self, config: LlamaConfig, target: PreTrainedModel, mask_token: int) -> None:
        """`mask_token`: the id of an unknown token from the second step on."""
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self._mask_token = mask_token
        base: Any = target.base_model
        with torch.no_grad():
            self.model.model.embed_tokens.weight.copy_(base.get_input_embeddings().weight)
            self.model.lm_head.weight.copy_(target.get_output_embeddings().weight)
            self.model.model.norm.weight.copy_(base.norm.weight)

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """See `Eagle3Module.forward`: row i + 1 predicts the token at i + 2 first, as the target does there."""
        base: Any = self.model.model
        past: list[Past] = [[] for _ in base.layers]
        logits = []
        for step in range(steps):
            ids = reading.ids_BL[:, : reading.ids_BL.shape[1] - step]
            x = base.embed_tokens(ids if step == 0 else torch.full_like(ids, self._mask_token))
            for layer, kept in zip(base.layers, past, strict=True):
                size = layer.self_attn.head_dim
                x = x + attended(layer.self_attn, layer.input_layernorm(x), kept, base.rotary_emb, size)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits.append(self.model.lm_head(base.norm(x))[:, 1:])
        return logits
