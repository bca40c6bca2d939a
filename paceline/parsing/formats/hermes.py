"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

Some models, such as Qwen2.5-Coder, leave out the marker: an object that begins a line, bare or in a code block, is a
call if a tool has its name.
"""

from __future__ import annotations

from paceline.parsing.json_text import BARE, object_calls
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((BEGIN, *BARE), Content)):
        found = False
        if marker == BEGIN:
            found = yield from object_calls(reader, (yield from reader.skip(*BARE)))
        elif reader.begins_line:
            found = yield from object_calls(reader, marker, tools)
        else:
            yield Content(reader.since_mark())
        if found:
            yield from reader.skip_closing(END)


HERMES = ToolFormat(
    "hermes",
    parse,
    markers=(BEGIN, END),
    template_signs=(BEGIN, '"name"', '"arguments"'),
    call=(BEGIN + '\n{"name": "', '", "arguments": ', "}\n" + END),
    separator="\n",
)
