"""Writes text with special tokens in it, such as the markers of tool calls, as parts of a grammar.

A grammar's ordinary text never allows a special token: it has to name the token's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.grammar.lark import text_part
from paceline.text import Tokenizer

NOWHERE = "(?!)"
"""A regular expression that matches nothing."""
TextOrToken = str | int
"""Ordinary text, or the id of a special token."""


class SpecialTokens:
    """The special tokens of a vocabulary, found by their text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = {text: token for token in tokenizer.special_ids if (text := tokenizer.token_string(token))}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or NOWHERE})")

    def split(self, text: str) -> list[TextOrToken]:
        """The text as ordinary texts, none of them empty, and special tokens."""
        parts = self._pattern.split(text)
        return [self._ids.get(part, part) for part in parts if part]


def merged(parts: Iterable[TextOrToken]) -> list[TextOrToken]:
    """The same text, with neighbouring ordinary texts as one."""
    result: list[TextOrToken] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result


def lark_parts(parts: Sequence[TextOrToken]) -> str:
    """These texts and tokens, one after another, as a part of a rule; `""` if there are none."""
    return " ".join(text_part(part) if isinstance(part, str) else f"<[{part}]>" for part in parts) or '""'
