"""The file of recordings, and what both sides make of it: the target and the checkpoints of heads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers.head_checkpoints import save_head
from tests.speculators_library import cases
from tests.speculators_library.cases import CASES

PATH = Path(__file__).parent / "recorded.json.gz"


def read() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return recorded


def write(recorded: Mapping[str, Any]) -> None:
    text = json.dumps(recorded, separators=(",", ":"), sort_keys=True)
    PATH.write_bytes(gzip.compress(text.encode(), mtime=0))


def target_network() -> Qwen3ForCausalLM:
    """In float32, always with the same weights."""
    config = Qwen3Config(
        vocab_size=cases.VOCABULARY,
        hidden_size=cases.HIDDEN,
        intermediate_size=cases.INNER,
        num_hidden_layers=cases.LAYERS,
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.KV_HEADS,
        head_dim=cases.HEAD_DIM,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    network = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(cases.numbers(name, parameter.shape))
    return network


def save_recorded(folder: Path, name: str, head: Mapping[str, Any]) -> Path:
    """The checkpoint that the package wrote for this case. Only the embedding of a head that trains none is the
    target's."""
    weights = dict(target_network().state_dict()) | cases.vocabulary()
    tensors = {}
    for key, (shape, _) in head["tensors"].items():
        copied = key in ("d2t", "t2d") or (key == "embed_tokens.weight" and CASES[name].kind != "peagle")
        tensors[key] = weights[key if key in weights else f"model.{key}"] if copied else cases.numbers(key, shape)
    return save_head(folder, tensors, head["config"])
