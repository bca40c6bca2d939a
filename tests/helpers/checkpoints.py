"""A tiny checkpoint on disk, as transformers and tokenizers write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from tests.helpers.llamas import VOCABULARY, peaked_llama


def save_checkpoint(folder: Path, eos_token_ids: Sequence[int] = ()) -> Path:
    """The peaked Llama; its tokenizer reads token i as the number i. There is no chat template."""
    network = peaked_llama()
    network.generation_config.eos_token_id = list(eos_token_ids) or None
    network.config.eos_token_id = None
    network.save_pretrained(folder)
    save_tokenizer(folder, range(VOCABULARY))
    return folder


def save_tokenizer(folder: Path, numbers: Sequence[int]) -> None:
    """Token i reads as `numbers[i]`."""
    backend = Tokenizer(models.WordLevel({str(number): i for i, number in enumerate(numbers)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
