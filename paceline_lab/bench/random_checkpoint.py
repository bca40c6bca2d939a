"""A checkpoint with the shape of Llama 3.1 8B and random weights: for times of passes, not for tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import family

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""As in the config.json of meta-llama/Llama-3.1-8B; its rotary frequencies are left at Llama's default."""


def write(folder: Path, device: str) -> Path:
    """16 GB of bfloat16 weights, drawn on `device`. Returns the folder."""
    config = LlamaConfig(**SHAPE, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    random = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
        weights[name] = (drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(0.0, 0.02, generator=random)).cpu()
    config.save_pretrained(folder)
    for file in family.path(family.NAMES[0]).glob("tokenizer*"):  # a model has one
        shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
