"""Colours text by its source: accepted draft tokens, or the target's own tokens."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import Protocol

from rich.console import Console
from rich.text import Text

from paceline.cli.http_client import HttpCompletion

ACCEPTED = "green"
BONUS = "bold yellow"
LEGEND = Text.assemble(("drafted and accepted", ACCEPTED), " · ", ("the target's own", BONUS))


class PaintedCompletion(Protocol):
    """A completion so far, of a server or of `paceline.LLM`. Token i covers the characters from `offsets[i]` on."""

    @property
    def text(self) -> str: ...
    @property
    def accepted(self) -> list[bool]: ...
    @property
    def offsets(self) -> list[int]: ...


class TokenPainter:
    """Prints a completion while it grows. Call it with the completion after every chunk."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.text = ""
        """What has been printed."""

    def __call__(self, completion: PaintedCompletion) -> None:
        new = range(len(self.text), len(completion.text))
        for style, offsets in groupby(new, lambda offset: _style(completion, offset)):
            text = "".join(completion.text[offset] for offset in offsets)
            self._console.print(Text(text, style), end="", soft_wrap=True)
        self.text = completion.text


def summary(completion: PaintedCompletion, seconds: float, verifications: int) -> str:
    """The speed and acceptance of a completion, in one line. `seconds`: the target's, from arrival to the last token.

    `verifications`: passes that verified draft tokens.
    """
    tokens, accepted = len(completion.accepted), sum(completion.accepted)
    speed = f"{tokens} tokens, {tokens / seconds:.0f} tokens/s"
    if not verifications:
        return f"{speed}, decoded plainly"
    length = f"acceptance length {accepted / verifications:.2f} without the bonus token"
    return f"{speed} · {accepted} accepted, {length}"


def served_summary(completion: HttpCompletion) -> str:
    """`summary` of a server's completion, on the target's clock."""
    return summary(completion, completion.timings["total_s"], completion.speculation.get("verifications", 0))


def _style(completion: PaintedCompletion, offset: int) -> str:
    """The style of the character at `offset`: that of the last token that begins at or before it."""
    token = bisect_right(completion.offsets, offset) - 1
    return ACCEPTED if 0 <= token < len(completion.accepted) and completion.accepted[token] else BONUS
