"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

The number counts the calls of a conversation. There are markers before and behind all calls.

Kimi K3: `<|open|>call tool="f" index="1"<|sep|>`, each argument in an element of its own, `<|close|>call<|sep|>`. An
argument is `<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>`; an element `json` may have all of
them. Calls are in an element `tools`, the answer is in an element `response`.
"""

from __future__ import annotations

import html
import re
from dataclasses import replace

from paceline.parsing.json_text import call_by_name
from paceline.parsing.tagged_arguments import Argument, Tags, argument_types, tagged_call
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
FUNCTIONS = "functions."
NUMBER = re.compile(r"[:\d]+")


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A section without calls is nothing: its markers are tokens that stand for nothing else."""
    while marker := (yield from reader.until((CALLS_BEGIN, BEGIN), Content)):
        begun = marker == BEGIN or (yield from reader.skip(BEGIN))
        called = begun and (yield from _call(reader, tools))
        if not called and (begun or not (yield from reader.accept(CALLS_END))):
            yield Content(reader.since_mark())


def _call(reader: TextReader, tools: Tools) -> Steps[bool]:
    yield from reader.space()
    name = yield from reader.run(NAME)
    yield from reader.run(NUMBER)
    if not (yield from reader.skip(ARGUMENTS)):
        return False
    if not (yield from call_by_name(reader, name if name in tools else name.removeprefix(FUNCTIONS))):
        return False
    yield from reader.skip_closing(END)
    yield from reader.skip_closing(CALLS_END)
    return True


KIMI_K2 = ToolFormat(
    "kimi_k2",
    parse,
    markers=(CALLS_BEGIN, CALLS_END, BEGIN, ARGUMENTS, END),
    template_signs=(CALLS_BEGIN, BEGIN, ARGUMENTS),
    call=(BEGIN + FUNCTIONS, ":0" + ARGUMENTS, END),
    opening=CALLS_BEGIN,
    closing=CALLS_END,
)
KIMI_K2_OLD = replace(KIMI_K2, template_signs=("<|im_middle|>", "tool_declare"))
"""The first template shows no calls."""

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
CALL, CALL_END = f"{OPEN}call", f"{CLOSE}call{SEPARATOR}"
JSON = f'{OPEN}json type="object"{SEPARATOR}'
ARGUMENT, ARGUMENT_END = f"{OPEN}argument", f"{CLOSE}argument{SEPARATOR}"
ELEMENTS = frozenset(("message", "think", "response", "tools", "call", "json", "argument"))
"""Elements whose markers are no text."""
ATTRIBUTES = re.compile(r"[^<]+")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def parse_k3(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((OPEN, CLOSE), Content)):
        element = yield from reader.run(NAME)
        attributes = yield from _attributes(reader)
        closed = element in ELEMENTS and (yield from reader.accept_cut(SEPARATOR))
        name = attributes.get("tool", "") if closed and marker == OPEN and element == "call" else ""
        if name:
            yield from reader.accept(JSON)
        called = name and tools and (yield from tagged_call(reader, name, tools.get(name, {}), TAGS))
        if not called and (name or not closed):
            yield Content(reader.since_mark())


def _attributes(reader: TextReader) -> Steps[dict[str, str]]:
    text = yield from reader.run(ATTRIBUTES)
    return {key: html.unescape(value) for key, value in ATTRIBUTE.findall(text)}


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    attributes = yield from _attributes(reader)
    key, kind = attributes.get("key"), attributes.get("type")
    if key is None or not (yield from reader.accept_cut(SEPARATOR)):
        return None
    return key, (kind,) if kind else argument_types(schema, key)


TAGS = Tags(ARGUMENT, _head, {ARGUMENT_END: (ARGUMENT, CALL_END)}, CALL_END)
KIMI_K3 = ToolFormat(
    "kimi_k3",
    parse_k3,
    markers=(OPEN, CLOSE, SEPARATOR),
    template_signs=(OPEN, CLOSE, SEPARATOR),
    call=(f'{CALL} tool="', f'" index="1"{SEPARATOR}', CALL_END),
    opening=f"{OPEN}tools{SEPARATOR}",
    closing=f"{CLOSE}tools{SEPARATOR}",
    wraps_content=True,
)
