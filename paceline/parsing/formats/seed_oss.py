"""Seed-OSS: `<seed:tool_call>`, then `<function=f>` with `<parameter=a>1</parameter>` in it."""

from __future__ import annotations

from paceline.parsing.argument_types import argument_types
from paceline.parsing.formats.qwen3_coder import FUNCTION, FUNCTION_END, KEY, PARAMETER, PARAMETER_END
from paceline.parsing.tagged_arguments import Argument, Tags, tagged_call
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A model may forget `<seed:tool_call>`. Then a tool must have the function's name."""
    while marker := (yield from reader.until((BEGIN, FUNCTION), Content)):
        begun = marker == FUNCTION or (yield from reader.skip(FUNCTION))
        name = (yield from reader.run(KEY)) if begun else ""
        known = (name in tools or marker == BEGIN) and (yield from reader.accept(">"))
        if known and (yield from tagged_call(reader, name, tools.get(name, {}), TAGS)):
            yield from reader.skip_closing(END)
        else:
            yield Content(reader.since_mark())


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key = yield from reader.run(KEY)
    return (key, argument_types(schema, key)) if key and (yield from reader.accept_cut(">")) else None


TAGS = Tags(
    PARAMETER, _head, {PARAMETER_END: (PARAMETER, FUNCTION_END), FUNCTION_END: (END, FUNCTION, BEGIN)}, FUNCTION_END
)
"""A model may forget the end of a value."""
SEED_OSS = ToolFormat(
    "seed_oss",
    parse,
    markers=(BEGIN, END),
    template_signs=(BEGIN, FUNCTION, PARAMETER),
    begin=f"{BEGIN}\n{FUNCTION}",
    middle=">\n",
    end=f"\n{FUNCTION_END}\n{END}",
    separator="\n",
)
