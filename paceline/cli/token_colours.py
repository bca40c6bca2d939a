"""Colours text by its source: accepted draft tokens, or the target's own tokens."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby

from rich.console import Console
from rich.text import Text

from paceline.cli.http_client import HttpCompletion

ACCEPTED = "green"
BONUS = "bold yellow"
LEGEND = Text.assemble(("drafted and accepted", ACCEPTED), " · ", ("the target's own", BONUS))


class TokenPainter:
    """Prints a completion while it grows. Call it with the completion after every chunk."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __call__(self, completion: HttpCompletion) -> None:
        new = range(self._shown, len(completion.text))
        for style, offsets in groupby(new, lambda offset: _style(completion, offset)):
            text = "".join(completion.text[offset] for offset in offsets)
            self._console.print(Text(text, style), end="", soft_wrap=True)
        self._shown = len(completion.text)


def summary(completion: HttpCompletion) -> str:
    """The speed and acceptance of a completion, in one line."""
    stats = completion.speculation
    speed = f"{len(completion.tokens)} tokens, {completion.tokens_per_s:.0f} tokens/s"
    if not stats.get("verifications"):
        return f"{speed}, decoded plainly"
    length = f"acceptance length {stats['acceptance_length']:.2f} without the bonus token"
    return f"{speed} · {stats['accepted_tokens']} accepted, {length}"


def _style(completion: HttpCompletion, offset: int) -> str:
    """The style of the character at `offset`: that of the last token that begins at or before it."""
    token = bisect_right(completion.offsets, offset) - 1
    return ACCEPTED if 0 <= token < len(completion.accepted) and completion.accepted[token] else BONUS
