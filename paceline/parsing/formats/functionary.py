"""Functionary 3.2: `>>>f` and a line with `{...}` for a call, `>>>all` and a line break before the answer.

The first `>>>` is in the prompt.
"""

from __future__ import annotations

from paceline.parsing.events import Content
from paceline.parsing.json_text import call_by_name
from paceline.parsing.text_reader import NAME, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN = ">>>"
ANSWER = "all"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A call needs the name of a tool: three signs may stand in an answer."""
    index, marker = 0, BEGIN
    reader.mark()
    while marker:
        yield from reader.skip(BEGIN)
        name = yield from reader.run(NAME)
        ended = bool((yield from reader.accept("\n")))
        if name in tools and ended and (yield from call_by_name(reader, index, name)):
            index += 1
            yield from reader.space()
        elif name == ANSWER and ended:
            reader.commit()
        else:
            yield Content(reader.since_mark())
        marker = yield from reader.until((BEGIN,), Content)


FUNCTIONARY_V3_2 = ToolFormat(
    "functionary_v3_2",
    parse,
    markers=(),
    template_signs=(">>>all",),
    begin="",
    middle="\n",
    end="",
    separator=BEGIN,
    wraps_content=True,
)
