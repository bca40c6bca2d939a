"""Functionary 3.2: `>>>f` and a line with `{...}` for a call, `>>>all` and a line break before the answer.

The first `>>>` is in the prompt. Functionary 3.1: `<function=f>{...}</function>`, as Meta has it for Llama 3.1.
"""

from __future__ import annotations

from paceline.parsing.json_text import call_by_name
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN = ">>>"
ANSWER = "all"
FUNCTION, FUNCTION_END = "<function=", "</function>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A call needs the name of a tool: three signs may stand in an answer."""
    marker = BEGIN
    reader.mark()
    while marker:
        yield from reader.skip(BEGIN)
        name = yield from reader.run(NAME)
        ended = bool((yield from reader.accept("\n")))
        if name in tools and ended and (yield from call_by_name(reader, name)):
            yield from reader.space()
        elif name == ANSWER and ended:
            reader.commit()
        else:
            yield Content(reader.since_mark())
        marker = yield from reader.until((BEGIN,), Content)


def parse_v3_1(reader: TextReader, tools: Tools) -> Steps[None]:
    """No token marks a call: a tool must have the function's name."""
    while (yield from reader.until((FUNCTION,), Content)):
        name = yield from reader.run(NAME)
        known = name in tools and (yield from reader.skip(">"))
        if known and (yield from call_by_name(reader, name)):
            yield from reader.skip_closing(FUNCTION_END)
        else:
            yield Content(reader.since_mark())


FUNCTIONARY_V3_2 = ToolFormat(
    "functionary_v3_2",
    parse,
    markers=(),
    template_signs=(">>>all",),
    call=("", "\n", ""),
    separator=BEGIN,
    wraps_content=True,
)
FUNCTIONARY_V3_1 = ToolFormat(
    "functionary_v3_1",
    parse_v3_1,
    markers=(),
    template_signs=("<|start_header_id|>", FUNCTION, "}" + FUNCTION_END),
    call=(FUNCTION, ">", FUNCTION_END),
)
