"""MiniCPM5: `<function name="f"><param name="a">1</param></function>`, values with or without `<![CDATA[...]]>`."""

from __future__ import annotations

import re

from paceline.parsing.tagged_arguments import Argument, Tags, argument_types, tagged_call
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

FUNCTION, FUNCTION_END = '<function name="', "</function>"
PARAMETER, PARAMETER_END = '<param name="', "</param>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
QUOTED = re.compile(r'[^"<>\n]+')


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """No token marks a call: a tool must have the function's name."""
    while (yield from reader.until((FUNCTION,), Content)):
        name = yield from reader.run(QUOTED)
        known = name in tools and (yield from reader.accept('">'))
        if not known or not (yield from tagged_call(reader, name, tools[name], TAGS)):
            yield Content(reader.since_mark())


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key = yield from reader.run(QUOTED)
    if not key or not (yield from reader.accept_cut('">')):
        return None
    yield from reader.accept(CDATA)
    return key, argument_types(schema, key)


BEHIND = (PARAMETER, FUNCTION_END)
TAGS = Tags(PARAMETER, _head, {CDATA_END + PARAMETER_END: BEHIND, PARAMETER_END: BEHIND}, FUNCTION_END)
MINICPM5 = ToolFormat(
    "minicpm5", parse, markers=(), template_signs=(FUNCTION, PARAMETER), call=(FUNCTION, '">', FUNCTION_END)
)
