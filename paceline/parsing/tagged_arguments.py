"""Arguments that models write one by one, each a key and a value as plain text between markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.parsing.argument_types import value_json
from paceline.parsing.json_text import call_arguments
from paceline.parsing.text_reader import SPACE, Content, Steps, TextReader, ToolArguments
from paceline.parsing.tool_format import JsonSchema

Ends: TypeAlias = Mapping[str, tuple[str, ...]]
"""The markers that end a value, each with the texts of which one must come next. Elsewhere they are mere text."""
Argument: TypeAlias = tuple[str, Sequence[str]]
"""An argument's key, and the types that its value may have."""


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks the arguments of a call."""

    begin: str
    """The marker before an argument."""
    head: Callable[[TextReader, JsonSchema], Steps[Argument | None]]
    """`head(reader, schema)`: consume what is between that marker and the value. None: it is no argument."""
    value_ends: Ends
    end: str
    """The marker behind the last argument."""


def tagged_call(reader: TextReader, name: str, schema: JsonSchema, tags: Tags) -> Steps[bool]:
    """A call of `name`, if there is a name and its arguments or its end come next. False: no event.

    A JSON object in the place of the arguments is read, too: grammars write that.
    """
    yield from reader.space()
    if not name or not ((yield from reader.peek()) == "{" or (yield from reader.next_of(tags.begin, tags.end))):
        return False
    yield reader.call(name)
    if (yield from reader.peek()) == "{":
        yield from call_arguments(reader)
        yield from reader.skip_closing(tags.end)
    else:
        yield from _arguments(reader, schema, tags)
    return True


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def argument_value(reader: TextReader, types: Sequence[str], ends: Ends, *, start: str = "") -> Steps[str]:
    """A value of these types up to one of these markers, as JSON; a text as it arrives.

    `start`: text of it that is consumed already. Returns the marker behind it; "": the end of all text.
    """
    if set(types) == {"string"}:
        return (yield from text_value(reader, ends, start=start))
    return (yield from _literal(reader, types, ends, start))


def text_value(reader: TextReader, ends: Ends, *, start: str = "") -> Steps[str]:
    """A text as a JSON string, as it arrives. See `argument_value`."""

    def event(text: str) -> ToolArguments:
        return reader.arguments(quoted(text)[1:-1])

    yield reader.arguments('"')
    yield event(start)
    while marker := (yield from reader.until(tuple(ends), event)):
        before = reader.gap
        reader.commit()
        behind, ended = yield from _end(reader, ends[marker])
        if ended:
            yield event(before)
            yield reader.arguments('"')
            return marker
        yield event(before + marker + behind)
    return ""


def _arguments(reader: TextReader, schema: JsonSchema, tags: Tags) -> Steps[None]:
    """Arguments up to the end of the call. Those that the end of the text cuts off stay open."""
    before, marker = "{", ""
    while marker != tags.end and (yield from _starts(reader, tags.begin)):
        argument = yield from tags.head(reader, schema)
        if argument is None:
            broken = reader.since_mark()
            cut = not (yield from reader.peek())
            key = broken.removeprefix(tags.begin).strip()
            yield reader.arguments(before + quoted(key)[:-1] if key else "") if cut else Content(broken)
            return
        reader.commit()
        key, types = argument
        yield reader.arguments(f"{before}{quoted(key)}: ")
        before = ", "
        marker = yield from argument_value(reader, types, tags.value_ends)
        if not marker:
            return
    if marker == tags.end or (yield from reader.accept(tags.end)):
        yield reader.arguments("{}" if before == "{" else "}")
        yield from reader.space()
    else:
        yield from reader.skip_closing(tags.begin, tags.end)


def _starts(reader: TextReader, marker: str) -> Steps[bool]:
    """Consume the marker if it comes next, and set the mark before it."""
    reader.mark()
    return bool((yield from reader.accept(marker)))


def _literal(reader: TextReader, types: Sequence[str], ends: Ends, start: str) -> Steps[str]:
    """A value that may be something else than a text: it has to be complete. See `argument_value`."""
    parts = [start]
    while True:
        text, marker = yield from reader.text_until(tuple(ends))
        parts.append(text)
        if not marker:
            yield reader.arguments("".join(parts))
            return ""
        behind, ended = yield from _end(reader, ends[marker])
        if ended:
            yield reader.arguments(value_json("".join(parts), types))
            return marker
        parts.append(marker + behind)


def _end(reader: TextReader, next_texts: tuple[str, ...]) -> Steps[tuple[str, bool]]:
    """White space behind a marker, which is consumed, and whether the marker ends the value."""
    behind = yield from reader.run(SPACE)
    found = yield from reader.next_of(*next_texts)
    return behind, bool(found) or reader.ends_before(*next_texts)
