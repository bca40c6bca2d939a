"""MiniMax M3: `<invoke name="f">`, `<a>1</a>`, ..., `</invoke>`, where `]<]minimax[>[` stands before each marker.

An argument is an element with its key for a name. Elements in it are the properties of an object or, each with the name
`item`, the items of a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.parsing.json_text import call_arguments
from paceline.parsing.tagged_arguments import argument_types, argument_value, quoted
from paceline.parsing.text_reader import SPACE, Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

TOKEN = "]<]minimax[>["
BEGIN, END = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
INVOKE, INVOKE_END = f'{TOKEN}<invoke name="', f"{TOKEN}</invoke>"
ELEMENT = f"{TOKEN}<"
ITEM = f"{ELEMENT}item>"
NAME = re.compile(r'[^"<>\n]+')


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((BEGIN, INVOKE), Content)):
        begun = marker == INVOKE or (yield from reader.skip(INVOKE))
        name = (yield from reader.run(NAME)) if begun else ""
        found = name != "" and (yield from reader.accept('">'))
        yield from reader.space()
        if not found or not ((yield from reader.peek()) == "{" or (yield from reader.next_of(ELEMENT))):
            yield Content(reader.since_mark())
            continue
        yield reader.call(name)
        if (yield from reader.peek()) == "{":  # a grammar writes JSON
            yield from call_arguments(reader)
            yield from reader.skip_closing(INVOKE_END)
        else:
            yield from _arguments(reader, tools.get(name, {}))
        yield from reader.skip_closing(END)


@dataclass(frozen=True, slots=True)
class _Open:
    """An element that is not closed, an object or a list."""

    tag: str
    schema: JsonSchema
    bracket: str

    def key(self, tag: str) -> str:
        """What is before a value in it."""
        return "" if self.bracket == "]" else f"{quoted(tag)}: "

    def below(self, tag: str) -> JsonSchema:
        """A schema whose property `tag` is what the element's schema says of an element in it."""
        found = next(_inner(self.schema, "items" if self.bracket == "]" else "properties"), None)
        if self.bracket == "]":
            return {"properties": {tag: {} if found is None else found}}
        return {"properties": found} if found is not None else {}


def _inner(schema: object, key: str) -> Iterator[object]:
    """The values of a key in a schema and in its alternatives."""
    if isinstance(schema, Mapping):
        if key in schema:
            yield schema[key]
        for options in (schema.get(name) for name in ("anyOf", "oneOf", "allOf")):
            for option in options if isinstance(options, list) else []:
                yield from _inner(option, key)


def _arguments(reader: TextReader, schema: JsonSchema) -> Steps[None]:
    """Arguments up to the end of the call. Those that the end of the text cuts off stay open."""
    yield reader.arguments("{")
    elements, before = [_Open("invoke", schema, "}")], ""
    while elements:
        outer = elements[-1]
        yield from reader.space()
        reader.mark()
        marker = yield from reader.accept(f"{TOKEN}</{outer.tag}>", ELEMENT)
        tag = (yield from reader.run(NAME)) if marker == ELEMENT else ""
        whole = marker not in ("", ELEMENT) or (tag != "" and (yield from reader.accept_cut(">")))
        if not whole:
            rest = reader.since_mark()
            if (yield from reader.peek()):
                yield Content(rest)
            elif tag:
                yield reader.arguments(before + quoted(tag)[:-1])
            return
        reader.commit()
        if not tag:
            yield reader.arguments(outer.bracket)
            elements.pop()
            before = ", "
            continue
        yield reader.arguments(before + outer.key(tag))
        inner = outer.below(tag)
        opened = yield from _value(reader, tag, inner)
        before = ", "
        if opened is not None:
            elements.append(opened)
            before = ""


def _value(reader: TextReader, tag: str, schema: JsonSchema) -> Steps[_Open | None]:
    """The value of an element, or the bracket of one with elements in it, which is returned."""
    types = argument_types(schema, tag)
    closing = f"{TOKEN}</{tag}>"
    space = yield from reader.run(SPACE)
    next_marker = yield from reader.next_of(closing, ITEM, ELEMENT)
    brackets = {"array": "[]", "object": "{}"}
    kind = next((each for each in types if each in brackets), "")
    if next_marker == closing and kind and "string" not in types:
        yield from reader.accept(closing)
        yield reader.arguments(brackets[kind])
        return None
    if next_marker in (ITEM, ELEMENT):
        if not kind or set(types) >= set(brackets):
            kind = "array" if next_marker == ITEM else "object"
        yield reader.arguments(brackets[kind][0])
        properties = schema.get("properties")
        inner = properties.get(tag) if isinstance(properties, Mapping) else None
        return _Open(tag, inner if isinstance(inner, Mapping) else {}, brackets[kind][1])
    yield from argument_value(reader, types, {closing: (TOKEN,)}, start=space)
    return None


MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    parse,
    markers=(TOKEN, "<tool_call>", "</tool_call>"),
    template_signs=(TOKEN, "<invoke name="),
    call=(INVOKE, '">', f"{INVOKE_END}\n"),
    opening=f"{BEGIN}\n",
    closing=END,
)
