"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

The number counts the calls of a conversation. There are markers before and behind all calls.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.parsing.json_text import call_by_name
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

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
    begin=BEGIN + FUNCTIONS,
    middle=":0" + ARGUMENTS,
    end=END,
    opening=CALLS_BEGIN,
    closing=CALLS_END,
)
KIMI_K2_OLD = replace(KIMI_K2, template_signs=("<|im_middle|>", "tool_declare"))
"""The first template shows no calls."""
