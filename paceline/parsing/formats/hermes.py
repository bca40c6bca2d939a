"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

Some models, such as Qwen2.5-Coder, leave out the marker: an object that begins a line, bare or in a code block, is a
call if a tool has its name.
"""

from __future__ import annotations

from paceline.parsing.events import Content
from paceline.parsing.object_calls import BARE, announced_calls, bare_calls
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    index = 0
    while marker := (yield from reader.until((BEGIN, *BARE), Content)):
        first = index
        if marker == BEGIN:
            index = yield from announced_calls(reader, index)
        elif reader.begins_line:
            index = yield from bare_calls(reader, index, marker, tools)
        else:
            yield Content(reader.since_mark())
        if index > first:
            yield from reader.skip_closing(END)


HERMES = ToolFormat(
    "hermes",
    parse,
    markers=(BEGIN, END),
    template_signs=(BEGIN, '"name"', '"arguments"'),
    begin=BEGIN + '\n{"name": "',
    middle='", "arguments": ',
    end="}\n" + END,
    separator="\n",
)
