"""Calls in Python between markers: LFM2's `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, and a call a line with
OLMo 3, between `<function_calls>` and `</function_calls>`.
"""

from __future__ import annotations

from functools import partial

from paceline.parsing.formats.pythonic import python_call
from paceline.parsing.json_text import call_object
from paceline.parsing.object_calls import call_list
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

LFM2_BEGIN, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"


def parse_lfm2(reader: TextReader, tools: Tools) -> Steps[None]:
    """Asked for JSON, LFM2 writes objects in place of the calls."""
    while (yield from reader.until((LFM2_BEGIN,), Content)):
        if (yield from reader.skip("[")):
            call = call_object if (yield from reader.peek()) == "{" else partial(python_call, names=None)
            found = yield from call_list(reader, call)
        elif not (found := (yield from call_object(reader))):
            yield Content(reader.since_mark())
        if found:
            yield from reader.skip_closing(LFM2_END)


def parse_olmo3(reader: TextReader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((OLMO_BEGIN,), Content)):
        first = reader.calls
        while (yield from python_call(reader, names=None)):
            yield from reader.skip(",")
            if (yield from reader.next_of(OLMO_END)) or reader.ends_before(OLMO_END):
                break
            reader.mark()
        else:
            yield Content(reader.since_mark())
        if reader.calls > first:
            yield from reader.skip_closing(OLMO_END)


LFM2 = ToolFormat(
    "lfm2",
    parse_lfm2,
    markers=(LFM2_BEGIN, LFM2_END),
    template_signs=(LFM2_BEGIN,),
    begin="",
    middle="(",
    end=")",
    separator=", ",
    opening=LFM2_BEGIN + "[",
    closing="]" + LFM2_END,
)
OLMO3 = ToolFormat(
    "olmo3",
    parse_olmo3,
    markers=(OLMO_BEGIN, OLMO_END),
    template_signs=(OLMO_BEGIN, OLMO_END),
    begin="",
    middle="(",
    end=")",
    separator="\n",
    opening=OLMO_BEGIN,
    closing=OLMO_END,
)
