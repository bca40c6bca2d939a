"""Step3: `<｜tool_call_begin｜>function<｜tool_sep｜>`, then `<steptml:invoke name="f">`, `<｜tool_call_end｜>`.

In it, `<steptml:parameter name="a">1</steptml:parameter>`. There are markers before and behind all calls.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.parsing.formats.invoke_calls import QUOTED, InvokeTags
from paceline.parsing.tagged_arguments import tagged_call
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

CALLS_BEGIN, CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
BEGIN, SEPARATOR, END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
TYPE = "function"
TAGS = InvokeTags(CALLS_BEGIN, "steptml:")
ARGUMENTS = replace(
    TAGS.arguments(),
    value_ends={TAGS.end("parameter"): (TAGS.parameter, TAGS.end("invoke")), TAGS.end("invoke"): (END,)},
)
"""A model may forget the end of a value: then the end of a call stands before its marker."""


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((CALLS_BEGIN, BEGIN), Content)):
        begun = marker == BEGIN or (yield from reader.skip(BEGIN))
        if not begun or not (yield from _call(reader, tools)):
            yield Content(reader.since_mark())


def _call(reader: TextReader, tools: Tools) -> Steps[bool]:
    for text in (TYPE, SEPARATOR, TAGS.invoke):
        if not (yield from reader.skip(text)):
            return False
    name = yield from reader.run(QUOTED)
    if not (yield from reader.accept('">')):
        return False
    if not (yield from tagged_call(reader, name, tools.get(name, {}), ARGUMENTS)):
        return False
    yield from reader.skip_closing(END)
    yield from reader.skip_closing(CALLS_END)
    return True


STEP3 = ToolFormat(
    "step3",
    parse,
    markers=(CALLS_BEGIN, CALLS_END, BEGIN, SEPARATOR, END),
    template_signs=(BEGIN, TAGS.invoke),
    call=(f"{BEGIN}{TYPE}{SEPARATOR}{TAGS.invoke}", '">\n', f"\n{TAGS.end('invoke')}{END}\n"),
    opening=f"{CALLS_BEGIN}\n",
    closing=CALLS_END,
)
