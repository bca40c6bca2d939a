"""JSON as models write it inside their answers, passed on as it arrives; and calls that are JSON objects: one or
several, in a list, in a code block, or bare."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from paceline.parsing.text_reader import Content, Event, Steps, TextReader

NAMES = ("name", "tool_name")
"""Keys under which models write the name of a call."""
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""
OTHER_KEYS = ("name", "type", "id")
"""Further keys that a call may have where nothing else says that it is one."""


def json_value(reader: TextReader, event: Callable[[str], Event] | None = None) -> Steps[str]:
    """One JSON value as it is written: consumed, yielded in parts as events, and returned.

    A value that the end of the text cuts off is returned as far as it goes. "": no value comes next.
    """
    return reader.scan(ValueScan().find_end, event)


def call_object(reader: TextReader) -> Steps[bool]:
    """`call_fields` of an object that may come next, behind white space."""
    yield from reader.space()
    return bool((yield from reader.accept("{"))) and (yield from call_fields(reader))


def call_fields(reader: TextReader, *, names: Collection[str] | None = None) -> Steps[bool]:
    """What is behind the "{" of an object with a name and arguments, as a call.

    `names`: nothing but the object itself says that it is a call, so it needs one of these names, needs arguments, and
    has no unusual keys. False: it is no such object, and there was no event.
    """
    name, held = "", ""
    while key := (yield from _key(reader)):
        if key in ARGUMENTS and name:
            yield reader.call(name)
            yield from call_arguments(reader)
            yield from _skip_to_end(reader)
            return True
        if names is not None and key not in (*ARGUMENTS, *OTHER_KEYS):
            return False
        value = yield from json_value(reader)
        if key in NAMES and not name:
            name = json_string(value) or ""
            if not name or (names is not None and name not in names):
                return False
        elif key in ARGUMENTS:
            held = value
    if not name or (names is not None and not held) or not (yield from reader.accept("}")):
        return False
    yield reader.call(name)
    yield reader.arguments(_as_object(held or "{}"))
    return True


def call_by_name(reader: TextReader, name: str) -> Steps[bool]:
    """A call of `name`, if there is a name and the object of its arguments comes next. False: no event."""
    if not name or (yield from reader.peek()) != "{":
        return False
    yield reader.call(name)
    yield from call_arguments(reader)
    return True


def call_arguments(reader: TextReader) -> Steps[None]:
    """The arguments of a call, as they arrive if they are an object."""
    if (yield from reader.peek()) == "{":
        yield from json_value(reader, reader.arguments)
    elif value := (yield from json_value(reader)):
        yield reader.arguments(_as_object(value))


def parse_json(text: str) -> object:
    """The value of a JSON text. Raises ValueError, whatever the text is."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def json_string(value: str) -> str | None:
    """The text of a JSON string; None if the value is none, or has halves of characters, which cannot be sent."""
    if not value.startswith('"'):
        return None
    try:
        text = str(parse_json(value))
        text.encode()
    except ValueError:
        return None
    return text


def _as_object(value: str) -> str:
    """Some models write null for no arguments, or the object as a string with the object's text."""
    if value == "null":
        return "{}"
    text = json_string(value)
    return text if text is not None and text.lstrip().startswith("{") and is_json(text) else value


def _key(reader: TextReader) -> Steps[str]:
    """Consume the next key of an object and what is before its value; "": there is none."""
    yield from reader.skip(",")
    if (yield from reader.peek()) != '"':
        return ""
    key = json_string((yield from json_value(reader)))
    return key if key is not None and (yield from reader.skip(":")) else ""


def _skip_to_end(reader: TextReader) -> Steps[None]:
    """Consume the rest of an object whose arguments are known."""
    while (yield from _key(reader)):
        yield from json_value(reader)
    yield from reader.accept("}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


NO_VALUE = "<`"
"""Characters that no value has outside quotes: they begin markers, so a model has left out closing brackets."""


@dataclass(slots=True)
class ValueScan:
    """Finds the end of a text in quotes, of brackets with what is in them, or of a word such as a number.

    `depth`: 1 if an opening bracket was seen before. Afterwards 0 says that all brackets are closed.
    """

    quotes: str = '"'
    depth: int = 0
    quote: str = ""
    """The quotes that the scan is in."""
    escaped: bool = False

    def find_end(self, text: str, start: int) -> tuple[int, bool]:
        """Where in this text the value ends, and whether it does. `start`: of what was not scanned before."""
        for index in range(start, len(text)):
            character = text[index]
            if self.quote:
                if self._in_quotes(character):
                    return index + 1, True
            elif character in self.quotes:
                self.quote = character
            elif character in "{[(":
                self.depth += 1
            elif character in "}])":
                self.depth -= 1
                if self.depth <= 0:
                    return index + (self.depth == 0), True
            elif character in NO_VALUE or (not self.depth and (character in ",:" or character.isspace())):
                return index, True
        return len(text), False

    def _in_quotes(self, character: str) -> bool:
        """Whether the value ends with this character of a text in quotes."""
        if self.escaped:
            self.escaped = False
        elif character == "\\":
            self.escaped = True
        elif character == self.quote:
            self.quote = ""
            return not self.depth
        return False


FENCE = "```"
BARE = (FENCE, "[", "{")
"""What a call may begin with where nothing announces it."""


def object_calls(reader: TextReader, begun: str, names: Collection[str] | None = None) -> Steps[bool]:
    """Calls behind one of `BARE`. Returns whether there is one. What is no call is content.

    `names`: nothing else says that they are calls, so they need one of these.
    """
    opened = begun
    if begun == FENCE:
        yield from reader.accept("json")
        opened = yield from reader.skip("[", "{")
    found = yield from _calls(reader, opened, names)
    if begun == FENCE and found:
        yield from reader.skip_closing(FENCE)
    return found


def _calls(reader: TextReader, opened: str, names: Collection[str] | None) -> Steps[bool]:
    """Calls up to the end of their list, if one is opened, or for as long as objects follow one another."""
    found, listed = False, opened == "["
    if listed:
        opened = yield from reader.skip("{")
    while opened == "{" and (yield from call_fields(reader, names=names)):
        found = True
        yield from reader.skip("}")  # models write one too many
        reader.mark()
        separator = yield from reader.skip(",", ";")
        opened = yield from reader.accept("{")
        if separator == "," and not opened:
            reader.reset()  # it belongs to a sentence
    if opened or not found:
        yield Content(reader.since_mark())
    elif listed:
        yield from reader.skip_closing("]")
    return found


def call_list(reader: TextReader, call: Callable[[TextReader], Steps[bool | None]]) -> Steps[bool]:
    """Calls behind a "[", separated by ",", up to the "]". Returns whether there is one.

    `call(reader)` consumes one and yields its events. It returns False, without events, for what is no call: that is
    content, and so is what comes after it. It returns None for a bad call, of which it knows the end: that is content,
    and the next one may be a call.
    """
    found = False
    while (read := (yield from call(reader))) is not False:
        if read is None:
            yield Content(reader.since_mark())
            reader.mark()
        found = found or read is True
        if (yield from reader.skip(",", "]")) != ",":
            break
        if read:
            reader.mark()
    if not read:
        yield Content(reader.since_mark())
    return found
