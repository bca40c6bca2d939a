"""What tokenizers put before a text: a space, or a mark for one. Text inside a text must do without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Part = Mapping[str, Any]


def without_prefix_space(tokenizer: Part) -> dict[str, Any]:
    """A tokenizer.json that reads a text as if other text stood before it."""
    normalizer, pre_tokenizer = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    return {
        **tokenizer,
        "normalizer": normalizer and _normalizer(normalizer),
        "pre_tokenizer": pre_tokenizer and _pre_tokenizer(pre_tokenizer),
    }


def _normalizer(part: Part) -> Part | None:
    """None if nothing is left of it."""
    if part["type"] == "Sequence":
        return {**part, "normalizers": [left for each in part["normalizers"] if (left := _normalizer(each))]}
    return None if part["type"] in ("Prepend", "Strip") else part


def _pre_tokenizer(part: Part) -> Part:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_pre_tokenizer(each) for each in part["pretokenizers"]]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part
