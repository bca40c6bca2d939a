"""Solar Open: `<|tool_call:begin|>0<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|>`, and Solar Open 2:
`<|tool_call:start|>f`, a line `<|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>` for each argument.
"""

from __future__ import annotations

from paceline.parsing.json_text import call_by_name
from paceline.parsing.tagged_arguments import Argument, Tags, argument_types, tagged_call
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

BEGIN, CALL_NAME = "<|tool_call:begin|>", "<|tool_call:name|>"
ARGUMENTS, END = "<|tool_call:args|>", "<|tool_call:end|>"
CALLS, MESSAGE, ROLE = "<|tool_calls|>", "<|begin|>", "assistant"
DROPPED = (CALLS, MESSAGE, "<|content|>", "<|end|>", "<|calls|>", "<|flush|>")
"""Markers of the messages that an answer consists of."""
START = "<|tool_call:start|>"
ARGUMENT, VALUE, ARGUMENT_END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((BEGIN, *DROPPED), Content)):
        if marker == MESSAGE:
            yield from reader.accept_cut(ROLE)
        elif marker == BEGIN and (not tools or not (yield from _call(reader))):
            yield Content(reader.since_mark())


def _call(reader: TextReader) -> Steps[bool]:
    yield from reader.run(NAME)  # ids are ours
    name = (yield from reader.run(NAME)) if (yield from reader.skip(CALL_NAME)) else ""
    yield from reader.skip(ARGUMENTS)
    found = yield from call_by_name(reader, name)
    if found:
        yield from reader.skip_closing(END)
    return found


def parse_open2(reader: TextReader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((START,), Content)):
        name = yield from reader.run(NAME)
        if not (yield from tagged_call(reader, name, tools.get(name, {}), TAGS)):
            yield Content(reader.since_mark())


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key, marker = yield from reader.text_until((VALUE, ARGUMENT, ARGUMENT_END, END))
    return (key, argument_types(schema, key)) if marker == VALUE else None


TAGS = Tags(ARGUMENT, _head, {ARGUMENT_END: (ARGUMENT, END), END: (START,)}, END)
"""A model may forget the end of a value."""
SOLAR_OPEN = ToolFormat(
    "solar_open",
    parse,
    markers=(BEGIN, CALL_NAME, ARGUMENTS, END, *DROPPED),
    template_signs=(BEGIN, CALL_NAME),
    call=(f"{BEGIN}0{CALL_NAME}", ARGUMENTS, END),
    opening=f"{MESSAGE}{ROLE}{CALLS}",
    wraps_content=True,
)
SOLAR_OPEN2 = ToolFormat(
    "solar_open2",
    parse_open2,
    markers=(START, END, ARGUMENT, VALUE, ARGUMENT_END),
    template_signs=(START, ARGUMENT),
    call=(START, "\n", f"\n{END}"),
    separator="\n",
)
