"""Text in the colours of those who found it: the draft's accepted guesses, and the target's own tokens."""

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
    """Prints an answer while it grows. Call it with the answer after every chunk."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __call__(self, answer: HttpCompletion) -> None:
        new = range(self._shown, len(answer.text))
        for style, places in groupby(new, lambda place: _style(answer, place)):
            text = "".join(answer.text[place] for place in places)
            self._console.print(Text(text, style), end="", soft_wrap=True)
        self._shown = len(answer.text)


def summary(answer: HttpCompletion) -> str:
    """What drafting did for an answer, in one line."""
    stats = answer.speculation
    speed = f"{len(answer.tokens)} tokens, {answer.tokens_per_s:.0f} tokens/s"
    if not stats.get("verifications"):
        return f"{speed}, decoded plainly"
    length = f"acceptance length {stats['acceptance_length']:.2f} without the bonus token"
    return f"{speed} · {stats['accepted_tokens']} accepted, {length}"


def _style(answer: HttpCompletion, place: int) -> str:
    """The style of the character at `place`: that of the last token that begins at or before it."""
    token = bisect_right(answer.offsets, place) - 1
    return ACCEPTED if 0 <= token < len(answer.accepted) and answer.accepted[token] else BONUS
