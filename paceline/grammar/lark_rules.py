"""Collects the rules of a grammar that mixes free text, markers and structured parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.grammar.json_schema import GrammarError
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


ANY_TEXT = "/(?s:.*)/"


class LarkRules:
    """The rules of one grammar so far. Names of rules can be used in the bodies of others.

    Methods that make a rule raise `GrammarError` once the grammar is too long: some small texts describe huge grammars.
    """

    def __init__(self) -> None:
        self._lines = ["TEXT: /(?s:.+)/"]
        self._length = 0

    def add(self, body: str, options: str = "", comment: str = "") -> str:
        """The name of a new rule with this body. `comment`: one line, with which errors in the rule begin."""
        name = f"rule_{len(self._lines)}"
        self._append(f"{name}{options}: {body}" + (f" // {comment}" if comment else ""))
        return name

    def one_of(self, bodies: Sequence[str]) -> str:
        """The name of a new rule: one of these bodies."""
        return self.add(" | ".join(bodies))

    def free_text(self) -> str:
        """Any text up to the end of the output, as a part of a rule."""
        return "TEXT?"

    def text_up_to(self, end: Sequence[TextOrToken]) -> str:
        """Any text before the first occurrence of this end, and the end, as a part of a rule.

        Raises `GrammarError` if the end is empty.
        """
        match end:
            case []:
                raise GrammarError("free text needs an end that is not empty")
            case [str(text)]:
                return self.add(f"{ANY_TEXT} {text_part(text)}", "[lazy]")
            case [str(text), *rest]:  # free text has no special token, so only the first one can end it
                before = f"BEFORE_{len(self._lines)}"
                self._append(f"{before}: {ANY_TEXT} {text_part(text)}")
                return f"{before} {lark_parts(rest)}"
            case _:
                return f"{self.free_text()} {lark_parts(end)}"

    def grammar(self, start: str) -> str:
        """The whole grammar: `start` is the body of its first rule."""
        return "\n".join([f"start: {start}", *self._lines])

    def _append(self, line: str) -> None:
        self._length += len(line)
        if self._length > MAX_GRAMMAR_LENGTH:
            raise GrammarError(f"too many characters as a grammar, {MAX_GRAMMAR_LENGTH} are the most")
        self._lines.append(line)
