"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from paceline.parsing.events import Content
from paceline.parsing.json_text import call_object
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    index = 0
    while (yield from reader.until((BEGIN,), Content)):
        if (yield from call_object(reader, index)):
            index += 1
            yield from reader.skip_closing(END)
        else:
            yield Content(reader.since_mark())


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
