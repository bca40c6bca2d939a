"""The shipped target and its draft with a vocabulary as large as Gemma's, for benchmarks.

Their tokenizer gets tokens that no text is cut into, and their embeddings rows of zeros for these, so that the
likeliest tokens stay the same. The target has rows beyond the vocabulary, too, as Qwen's; its draft has none.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from string import ascii_lowercase

import torch
from safetensors.torch import load_file, save_file

from paceline import family

TOKENS = 262_144
PADDING = 128
"""Rows of the target that are no tokens."""
EMBEDDING = "model.embed_tokens.weight"


def write_large_family(folder: Path) -> tuple[Path, Path]:
    """Writes target and draft below `folder`."""
    target, draft = (folder / f"{name}-large" for name in family.NAMES)
    _write(family.path(family.NAMES[0]), target, TOKENS + PADDING)
    _write(family.path(family.NAMES[1]), draft, TOKENS)
    return target, draft


def _write(source: Path, folder: Path, rows: int) -> None:
    shutil.copytree(source, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = _filled(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(source / "model.safetensors")
    embedding = weights[EMBEDDING]
    weights[EMBEDDING] = torch.cat([embedding, embedding.new_zeros(rows - len(embedding), embedding.shape[1])])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))


def _filled(vocabulary: dict[str, int]) -> dict[str, int]:
    """With made-up words behind its tokens."""
    rng, filled = Random(1), dict(vocabulary)
    while len(filled) < TOKENS:
        filled.setdefault("".join(rng.choices(ascii_lowercase, k=rng.randint(5, 12))), len(filled))
    return filled
