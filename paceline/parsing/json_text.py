"""JSON as models write it inside their answers, passed on as it arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.parsing.events import Event, ToolArguments, ToolCall
from paceline.parsing.text_reader import Steps, TextReader

ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""


def json_value(reader: TextReader, event: Callable[[str], Event] | None = None) -> Steps[str]:
    """One JSON value as it is written: consumed, yielded in parts as events, and returned.

    A value that the end of the text cuts off is returned as far as it goes. "": no value comes next.
    """
    value, scan, ended = "", _ValueScan(), False
    while not ended and (yield from reader.peek()):
        size, ended = scan.feed(reader.rest)
        part = reader.consume(size)
        value += part
        if part and event is not None:
            yield event(part)
    return value


def call_object(
    reader: TextReader, index: int, *, names: Collection[str] | None = None, keys: Collection[str] = ARGUMENTS
) -> Steps[bool]:
    """An object with a "name" and arguments, as the call `index`. `names`: those that it may have; None: any.

    False: it is no such object. Then there was no event, and the reader stands before it again.
    """
    reader.mark()
    name, held = "", ""
    if not (yield from reader.accept("{")):
        reader.reset()
        return False
    while (yield from _next_key(reader)) and (key := _text((yield from json_value(reader)))) is not None:
        yield from reader.space()
        if not (yield from reader.accept(":")):
            break
        yield from reader.space()
        if key not in keys:
            value = yield from json_value(reader)
            name = (_text(value) or "") if key == "name" and not name else name
            if key == "name" and (not name or (names is not None and name not in names)):
                break
        elif name:
            reader.commit()
            yield ToolCall(index, name)
            yield from call_arguments(reader, index)
            yield from _skip_to_end(reader)
            return True
        else:
            held = yield from json_value(reader)
    closed = yield from reader.accept("}")
    if not (closed and name) or (names is not None and name not in names):
        reader.reset()
        return False
    reader.commit()
    yield ToolCall(index, name)
    yield ToolArguments(index, held or "{}")
    return True


def call_arguments(reader: TextReader, index: int) -> Steps[None]:
    """The arguments of the call `index`. Some models write the object as a string with the object's text."""
    if (yield from reader.peek()) == '"':
        value = yield from json_value(reader)
        yield ToolArguments(index, _text(value) or value)
    else:
        yield from json_value(reader, lambda text: ToolArguments(index, text))


def _next_key(reader: TextReader) -> Steps[bool]:
    yield from reader.space()
    yield from reader.accept(",")
    yield from reader.space()
    return (yield from reader.peek()) == '"'


def _skip_to_end(reader: TextReader) -> Steps[None]:
    """Consume the rest of an object whose arguments are known."""
    while (yield from _next_key(reader)):
        yield from json_value(reader)
        yield from reader.space()
        if not (yield from reader.accept(":")):
            return
        yield from reader.space()
        yield from json_value(reader)
    yield from reader.accept("}")


def _text(value: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        text = json.loads(value)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


@dataclass(slots=True)
class _ValueScan:
    """Finds the end of a JSON value."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def feed(self, text: str) -> tuple[int, bool]:
        """How many characters of this text belong to the value, and whether it ends with them."""
        for index, character in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = character == "\\", character != '"'
                if not self.quoted and not self.depth:
                    return index + 1, True
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return index + (self.depth == 0), True
            elif not self.depth and (character in ",:" or character.isspace()):
                return index, True
        return len(text), False
