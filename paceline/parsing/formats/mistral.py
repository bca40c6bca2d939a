"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, and since version 11 of its tokenizer
`[TOOL_CALLS]f[ARGS]{...}`, any number of them, with or without `[CALL_ID]...` and `[ARGS]`.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.parsing.json_text import call_by_name, call_list, call_object
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import JSON_CALL, ToolFormat, Tools

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((BEGIN,), Content)):
        if (yield from reader.skip("[")):
            yield from call_list(reader, call_object)
        elif not (yield from _named_call(reader)):
            yield Content(reader.since_mark())


def _named_call(reader: TextReader) -> Steps[bool]:
    """A call whose name stands before its arguments."""
    name = yield from reader.run(NAME)
    if (yield from reader.skip(CALL_ID)):
        yield from reader.run(NAME)  # ids are ours
    yield from reader.skip(ARGS)
    if not (yield from call_by_name(reader, name)):
        return False
    yield from reader.space()
    return True


MISTRAL = ToolFormat(
    "mistral",
    parse,
    markers=(BEGIN, CALL_ID, ARGS),
    template_signs=(BEGIN,),
    call=JSON_CALL,
    separator=", ",
    opening=BEGIN + " [",
    closing="]",
    id_style="mistral",
)
MISTRAL_V11 = replace(
    MISTRAL, template_signs=(BEGIN, ARGS), call=(BEGIN, ARGS, ""), separator="", opening="", closing=""
)
"""The same name: templates tell them apart."""
