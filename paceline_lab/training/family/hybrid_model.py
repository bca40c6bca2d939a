"""The hybrid: a Qwen3.5 of gated delta rule and gated attention, with its layer for multi-token prediction.

It is a target on which layers that keep a state can be tried and tested, not a better model than pydoc.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from paceline_lab.training.family.family_models import ATTENTION, POSITIONS, save_model
from paceline_lab.training.family.family_tokenizer import END_OF_TEXT, SPECIAL, TURN_END, VOCABULARY

WEIGHTS = "model.safetensors"
MTP_PREFIX = "mtp."
"""Before the tensors of the layer for multi-token prediction, as in Qwen3.5's own checkpoints."""

FINAL_NORM = 0.4
"""Of every channel, before training."""


def hybrid_config(**changes: int) -> Qwen3_5TextConfig:
    """Eight layers of width 192, every fourth of them attention: 2.2 million parameters, a third of them the
    embeddings."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": POSITIONS,
    }
    return Qwen3_5TextConfig(
        **sizes | changes,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index(END_OF_TEXT),
        eos_token_id=SPECIAL.index(TURN_END),
        pad_token_id=SPECIAL.index(END_OF_TEXT),
        mtp_num_hidden_layers=1,
    )


def new_hybrid(config: Qwen3_5TextConfig, target: LlamaForCausalLM, seed: int) -> Qwen3_5ForCausalLM:
    """A hybrid in float32, freshly initialised, except for the target's embeddings: their principal components, as many
    as the hybrid is wide. The final norm begins small: until the layers have learnt, a token predicts itself."""
    torch.manual_seed(seed)
    hybrid: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM._from_config(
        config, attn_implementation=ATTENTION, dtype=torch.float32
    )
    embedding = target.model.embed_tokens.weight.float()
    _, _, components = torch.linalg.svd(embedding, full_matrices=False)
    with torch.no_grad():
        hybrid.model.embed_tokens.weight.copy_(embedding @ components[: config.hidden_size].T)
        hybrid.model.norm.weight.fill_(FINAL_NORM - 1)  # Qwen3.5 adds 1
    return hybrid


def save_hybrid(hybrid: Qwen3_5ForCausalLM, mtp: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the hybrid and its layer for multi-token prediction, in the layout of Qwen3.5's own checkpoints."""
    save_model(hybrid, tokenizer, folder)
    layer = {MTP_PREFIX + name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in mtp.named_parameters()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(load_file(folder / WEIGHTS) | layer, partial, {"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / WEIGHTS)


def load_hybrid(folder: Path) -> Qwen3_5ForCausalLM:
    """What `save_hybrid` wrote, in float32, without the layer for multi-token prediction."""
    model: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
