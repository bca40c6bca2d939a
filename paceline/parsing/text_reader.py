"""Parsers of text that arrives in parts, written as if the whole text were there.

A parser is a generator (`Steps`). It yields events, and None where it needs more text; `OutputParser` resumes it when
more has come. It never acts on a text that more text could change, so what it finds does not depend on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from paceline.parsing.events import Event

T = TypeVar("T")
Steps = Generator[Event | None, None, T]


class TextReader:
    """The text that is not parsed yet. Methods that return `Steps` are used with `yield from`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.ended = False
        """Whether no more text will come."""

    def add(self, text: str, *, last: bool) -> None:
        """Text has arrived."""
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = None if self._mark is None else 0
        self.ended = last

    @property
    def rest(self) -> str:
        """The text that has arrived and is not consumed."""
        return self._text[self._at :]

    def consume(self, size: int) -> str:
        """The next characters, which must have arrived."""
        start, self._at = self._at, self._at + size
        return self._text[start : self._at]

    def mark(self) -> None:
        """Remember this place until `reset` or `commit`."""
        self._mark = self._at

    def reset(self) -> None:
        """Go back to the place of `mark`."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def commit(self) -> None:
        """Forget the place of `mark`."""
        self._mark = None

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        size = len(self.rest)
        while len(self.rest) == size and not self.ended:
            yield None
        return len(self.rest) > size

    def peek(self) -> Steps[str]:
        """The next character, not consumed; "" at the end."""
        while not self.rest and (yield from self.more()):
            pass
        return self.rest[:1]

    def space(self) -> Steps[None]:
        """Consume white space."""
        while (yield from self.peek()).isspace():
            self.consume(1)

    def accept(self, *texts: str) -> Steps[str]:
        """Consume the first of these texts that comes next, and return it; "": none of them does."""
        while any(text.startswith(self.rest) and text != self.rest for text in texts) and (yield from self.more()):
            pass
        found = next((text for text in texts if self.rest.startswith(text)), "")
        self.consume(len(found))
        return found

    def until(
        self, markers: Sequence[str], event: Callable[[str], Event] | None = None, *, after_marker: bool = False
    ) -> Steps[str]:
        """Yield the text before the first marker as events, consume the marker and return it; "" at the end.

        White space next to a marker belongs to no event. `after_marker`: whether the text begins behind one. `event`
        None: the text is dropped.
        """
        begun = not after_marker
        while True:
            rest, ended = self.rest, self.ended
            found = [(rest.find(each), -len(each), each) for each in markers if each in rest]
            at, _, marker = min(found, default=(-1, 0, ""))
            size = at if marker else len(rest) - (0 if ended else undecided(rest, markers))
            text = rest[:size] if ended and not marker else rest[:size].rstrip()
            start = 0 if begun else len(text) - len(text.lstrip())
            if text[start:]:
                begun = True
                if event is not None:
                    yield event(text[start:])
            self.consume(size + len(marker) if marker else len(text))
            if marker or ended:
                return marker
            yield from self.more()


def undecided(text: str, markers: Sequence[str]) -> int:
    """The size of the longest end of the text with which a marker may begin."""
    longest = max(map(len, markers), default=1)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)
