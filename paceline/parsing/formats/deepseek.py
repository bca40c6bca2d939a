"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, JSON in a fence, `<｜tool▁call▁end｜>`.

V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. Both have a marker before and behind all
calls.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.parsing.json_text import call_by_name
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """Both versions: with V3's, the first word is the type of the call."""
    while marker := (yield from reader.until((CALLS_BEGIN, BEGIN), Content)):
        begun = marker == BEGIN or (yield from reader.skip(BEGIN))
        if not begun or not (yield from _call(reader)):
            yield Content(reader.since_mark())


def _call(reader: TextReader) -> Steps[bool]:
    name = yield from reader.run(NAME)
    if not (yield from reader.skip(SEPARATOR)):
        return False
    name = (yield from reader.run(NAME)) or name
    yield from reader.skip(FENCE + "json")
    if not (yield from call_by_name(reader, name)):
        return False
    for marker in (FENCE, END, CALLS_END):
        yield from reader.skip_closing(marker)
    return True


DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    parse,
    markers=(CALLS_BEGIN, CALLS_END, BEGIN, SEPARATOR, END),
    template_signs=(BEGIN, FENCE + "json"),
    call=(BEGIN + "function" + SEPARATOR, "\n" + FENCE + "json\n", "\n" + FENCE + END),
    separator="\n",
    opening=CALLS_BEGIN,
    closing=CALLS_END,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3, name="deepseek_v31", template_signs=(BEGIN,), call=(BEGIN, SEPARATOR, END), separator=""
)
