"""A tiny checkpoint on disk, as transformers and tokenizers write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

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
