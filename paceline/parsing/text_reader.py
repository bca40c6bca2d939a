"""Parsers of text that arrives in parts, written as if the whole text were there.

A parser is a generator (`Steps`). It yields events, and None where it needs more text; `OutputParser` resumes it when
more has come. It never acts on a text that more text could change, so what it finds does not depend on the parts.

The work is linear in the size of the text: what a method has looked at it consumes, and what it leaves for later is
shorter than a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the text that a model thinks before it answers. An empty text, which formats yield, is its end."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins. `index` counts the calls of one message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Some of the arguments of a call that has begun, as JSON. They are JSON only if the model wrote JSON."""

    index: int
    text: str


Event = Reasoning | Content | ToolCall | ToolArguments


T = TypeVar("T")
Steps = Generator[Event | None, None, T]

NAME = re.compile(r"[\w.-]+")
"""What a tool's name consists of."""
SPACE = re.compile(r"\s+")


class TextReader:
    """The text that is not parsed yet. Methods that return `Steps` are used with `yield from`."""

    ended: bool = False
    """Whether no more text will come."""
    gap: str = ""
    """The white space before the marker that `until` found last."""
    dropped: str = ""
    """A marker that is no content: `until` consumes it once, with the white space around it."""
    begins_line: bool = True
    """Whether the marker that was found last stands first in its line, but for blanks."""
    calls: int = 0
    """Calls that have begun."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marked: list[str] | None = None  # what was consumed since the mark
        self._line_begins = True  # nothing but blanks was consumed since the last line break

    def add(self, text: str, *, last: bool) -> None:
        """Text has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.ended = last

    def mark(self) -> None:
        """Remember what is consumed from here on, until `commit`, `since_mark` or `until`."""
        self._marked = []

    def commit(self) -> None:
        """Forget the mark: what was consumed since is accounted for."""
        self._marked = None

    def call(self, name: str) -> ToolCall:
        """The event of a call that begins here: what was consumed since the mark is accounted for."""
        self.commit()
        self.calls += 1
        return ToolCall(self.calls - 1, name)

    def arguments(self, text: str) -> ToolArguments:
        """Some of the arguments of the call that began last."""
        return ToolArguments(self.calls - 1, text)

    def since_mark(self) -> str:
        """What was consumed since the mark. Forgets the mark."""
        text = "".join(self._marked or ())
        self._marked = None
        return text

    def reset(self) -> None:
        """Go back to the mark, and forget it."""
        text = self.since_mark()
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text = text + self._text[self._at :]
            self._at = 0

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        size = self._size()
        while self._size() == size and not self.ended:
            yield None
        return self._size() > size

    def peek(self) -> Steps[str]:
        """The next character, not consumed; "" at the end."""
        while not self._size() and (yield from self.more()):
            pass
        return self._text[self._at : self._at + 1]

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Consume as many characters as match, one or more at a time."""
        parts: list[str] = []
        while (yield from self.peek()) and (found := characters.match(self._text, self._at)):
            parts.append(self._consume(found.end()))
        return "".join(parts)

    def space(self) -> Steps[None]:
        """Consume white space."""
        yield from self.run(SPACE)

    def next_of(self, *texts: str) -> Steps[str]:
        """The first of these texts that comes next, not consumed; "": none of them does."""
        while any(self._may_become(text) for text in texts) and (yield from self.more()):
            pass
        return next((text for text in texts if self._text.startswith(text, self._at)), "")

    def ends_before(self, *texts: str) -> bool:
        """Whether all text ends here, or amid one of these texts."""
        return self.ended and any(self._may_become(text) for text in texts)

    def accept(self, *texts: str) -> Steps[str]:
        """Consume the first of these texts that comes next, and return it; "": none of them does."""
        found = yield from self.next_of(*texts)
        self._consume(self._at + len(found))
        return found

    def accept_cut(self, *texts: str) -> Steps[bool]:
        """`accept`; where all text ends amid one of these texts, consume that. Returns whether it did."""
        found = bool((yield from self.accept(*texts)))
        if not found and self.ends_before(*texts):
            self._consume(len(self._text))
            found = True
        return found

    def skip(self, *texts: str) -> Steps[str]:
        """`accept`, with white space before and behind."""
        yield from self.space()
        found = yield from self.accept(*texts)
        yield from self.space()
        return found

    def skip_closing(self, *markers: str) -> Steps[str]:
        """`skip` one of the markers behind a call; where the text ends amid it, what there is of it."""
        found = yield from self.skip(*markers)
        if not found:
            yield from self.accept_cut(*markers)
        return found

    def scan(
        self, find_end: Callable[[str, int], tuple[int, bool]], event: Callable[[str], Event] | None = None
    ) -> Steps[str]:
        """Consume and return a text whose end a scanner finds, yielding its parts as events if `event` is given.

        `find_end(text, start)` is called once for each character from `start` on. It returns where the text that it
        looks for ends, or the text's size, and whether it has ended. The end of all text ends it, too.
        """
        parts, ended = [], False
        while not ended and (yield from self.peek()):
            end, ended = find_end(self._text, self._at)
            part = self._consume(end)
            parts.append(part)
            if part and event is not None:
                yield event(part)
        return "".join(parts)

    def until(self, markers: tuple[str, ...], event: Callable[[str], Event]) -> Steps[str]:
        """Yield the text before the first of these markers as events, consume the marker and return it; "": the end.

        White space before the marker is in no event; `gap` has it. The mark is set before that white space, so that
        `since_mark` returns what begins with a marker and proves to be mere text. No marker may contain another one.
        """
        self.commit()
        gap: list[str] = []
        dropped = self.dropped if event is Content else ""
        sought = (*markers, dropped) if dropped else markers
        text, marker = yield from self._part(sought)
        while text or marker:
            body = text.rstrip()
            if body:
                yield event("".join(gap) + body)
                gap.clear()
            gap.append(text[len(body) :])
            if marker and marker == dropped:
                self.dropped, dropped, sought = "", "", markers
                gap.clear()
                yield from self.space()
            elif marker:
                self.gap = "".join(gap)
                self._marked = [self.gap, marker]
                return marker
            text, marker = yield from self._part(sought)
        if any(gap):
            yield event("".join(gap))
        return ""

    def text_until(self, markers: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Consume the text before the first of these markers, and the marker; return both. No marker: the end."""
        parts: list[str] = []
        text, marker = yield from self._part(markers)
        while text and not marker:
            parts.append(text)
            text, marker = yield from self._part(markers)
        return "".join(parts) + text, marker

    def _part(self, markers: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Consume some text before the first marker, and the marker if it comes next. Both are "" at the end."""
        while True:
            found = _any_of(markers).search(self._text, self._at)
            if found is not None:
                text = self._consume(found.start())
                self.begins_line = self._line_begins
                return text, self._consume(found.end())
            decided = len(self._text) - (0 if self.ended else self._undecided(markers))
            if decided > self._at:
                return self._consume(decided), ""
            if self.ended:
                return "", ""
            yield from self.more()

    def _undecided(self, markers: tuple[str, ...]) -> int:
        """The size of the longest end of the text with which a marker may begin."""
        return max((self._begun(marker) for marker in markers), default=0)

    def _begun(self, marker: str) -> int:
        at = max(self._at, len(self._text) - len(marker) + 1)
        while (at := self._text.find(marker[0], at)) >= 0:
            if marker.startswith(self._text[at:]):
                return len(self._text) - at
            at += 1
        return 0

    def _may_become(self, text: str) -> bool:
        return self._size() < len(text) and text.startswith(self._text[self._at :])

    def _size(self) -> int:
        return len(self._text) - self._at

    def _consume(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._marked is not None:
            self._marked.append(text)
        if line := text.rstrip(" \t"):
            self._line_begins = line.endswith("\n")
        return text


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")  # (?!) matches nowhere
