"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from collections.abc import Collection

from paceline.parsing.events import Content
from paceline.parsing.json_text import call_object
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(reader: TextReader, names: Collection[str], after_marker: bool) -> Steps[None]:
    index = 0
    while (yield from reader.until((BEGIN,), Content, after_marker=after_marker)):
        yield from reader.space()
        if (yield from call_object(reader, index)):
            index += 1
            yield from reader.until((END,))
        else:
            yield Content(BEGIN)  # not a call: shown as it is written
        after_marker = True


HERMES = ToolFormat(
    "hermes",
    parse,
    markers=(BEGIN, END),
    template_signs=("<tool_call>", '"name"', '"arguments"'),
    begin=BEGIN + '\n{"name": "',
    middle='", "arguments": ',
    end="}\n" + END,
    separator="\n",
)
