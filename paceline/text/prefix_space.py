"""Tokenizers that put a space before a text: a version without it, for text that continues other text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Part = Mapping[str, Any]


def without_prefix_space(tokenizer: Part) -> dict[str, Any]:
    """The contents of a tokenizer.json, changed to encode text as if it followed other text."""
    normalizer, pre_tokenizer = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    return {
        **tokenizer,
        "normalizer": normalizer and _normalizer(normalizer),
        "pre_tokenizer": pre_tokenizer and _pre_tokenizer(pre_tokenizer),
    }


def _normalizer(part: Part) -> Part | None:
    """None if nothing remains."""
    if part["type"] == "Sequence":
        return {**part, "normalizers": [kept for each in part["normalizers"] if (kept := _normalizer(each))]}
    return None if part["type"] in ("Prepend", "Strip") else part


def _pre_tokenizer(part: Part) -> Part:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_pre_tokenizer(each) for each in part["pretokenizers"]]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part
