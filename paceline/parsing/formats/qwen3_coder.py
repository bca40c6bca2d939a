"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, line breaks between them.

Values are plain text. The tool's schema says which of them are numbers, lists and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.parsing.argument_types import argument_types, value_json
from paceline.parsing.events import Content, ToolArguments, ToolCall
from paceline.parsing.json_text import call_arguments
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
"""A model may forget the first."""
KEY = re.compile(r"[^<>\n]+")


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A model may forget `<tool_call>`, too. Then a tool must have the function's name."""
    index = 0
    while marker := (yield from reader.until((BEGIN, FUNCTION), Content)):
        begun = marker == FUNCTION or (yield from reader.skip(FUNCTION))
        name = (yield from reader.run(KEY)).strip() if begun else ""
        known = name in tools or (name != "" and marker == BEGIN)
        if known and (yield from reader.accept(">")):
            reader.commit()
            yield ToolCall(index, name)
            yield from _arguments(reader, index, tools.get(name, {}))
            yield from reader.skip_closing(END)
            index += 1
        else:
            yield Content(reader.since_mark())


def _arguments(reader: TextReader, index: int, schema: JsonSchema) -> Steps[None]:
    """Up to the end of the function. Arguments that the end of the text cuts off stay open."""
    yield from reader.space()
    if (yield from reader.peek()) == "{":  # a grammar writes JSON
        yield from call_arguments(reader, index)
        yield from reader.skip_closing(FUNCTION_END)
        return
    before = "{"
    marker = yield from reader.accept(PARAMETER, FUNCTION_END, END)
    while marker == PARAMETER:
        key = (yield from reader.run(KEY)).strip()
        yield from reader.accept(">")
        yield ToolArguments(index, f"{before}{_quoted(key)}: ")
        before = ", "
        marker = yield from _value(reader, index, argument_types(schema, key))
        if marker == PARAMETER_END:
            yield from reader.space()
            marker = yield from reader.accept(PARAMETER, FUNCTION_END, END)
    if marker in (FUNCTION_END, END):
        yield ToolArguments(index, "{}" if before == "{" else "}")
    else:
        yield from reader.skip_closing(PARAMETER, FUNCTION_END, END)


def _value(reader: TextReader, index: int, types: Sequence[str]) -> Steps[str]:
    """One value, without the line breaks next to its markers; a text as it arrives. Returns the marker behind it."""
    yield from reader.accept("\n")
    if set(types) != {"string"}:
        text, marker = yield from reader.text_until(VALUE_ENDS)
        yield ToolArguments(index, value_json(text.removesuffix("\n"), types) if marker else text)
        return marker
    yield ToolArguments(index, '"')
    marker = yield from reader.until(VALUE_ENDS, lambda text: ToolArguments(index, _quoted(text)[1:-1]))
    if marker:
        yield ToolArguments(index, _quoted(reader.gap.removesuffix("\n"))[1:])
    return marker


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    parse,
    markers=(BEGIN, END),
    template_signs=(BEGIN, FUNCTION, PARAMETER),
    begin=f"{BEGIN}\n{FUNCTION}",
    middle=">\n",
    end=f"\n{FUNCTION_END}\n{END}",
    separator="\n",
)
QWEN3_XML = replace(QWEN3_CODER, name="qwen3_xml")
