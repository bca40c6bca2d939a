"""Llama 3 and 4: `{"name": "f", "parameters": {...}}`, several separated by ";" or in a list.

Behind `<|python_tag|>` such an object is a call. A bare one may as well be the answer: it is a call only if a tool has
its name. https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.parsing.json_text import BARE, object_calls
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

TAG, BEGIN, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
HEADERS: Mapping[str, str] = {"<|start_header_id|>": "<|end_header_id|>", "<|header_start|>": "<|header_end|>"}
"""What a turn begins with, and the end of that. Behind it models begin their answer once more."""


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((TAG, BEGIN, *HEADERS, *BARE), Content)):
        found = False
        if marker in HEADERS:
            yield from _header(reader, HEADERS[marker])
        elif marker in BARE:
            found = yield from object_calls(reader, marker, tools)
        else:
            found = yield from object_calls(reader, (yield from reader.skip(*BARE)))
        if found:
            yield from reader.skip_closing(END)
            yield from reader.skip(";")


def _header(reader: TextReader, end: str) -> Steps[None]:
    """A header that begins a line is no content; another one is a word about it."""
    begins_line = reader.begins_line
    yield from reader.run(NAME)
    if begins_line and (yield from reader.accept(end)):
        yield from reader.space()
    else:
        yield Content(reader.since_mark())


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    parse,
    markers=(TAG, "<|start_header_id|>", "<|end_header_id|>"),
    template_signs=("<|start_header_id|>", '"parameters"'),
    call=('{"name": "', '", "parameters": ', "}"),
    separator="; ",
)
LLAMA4_JSON = replace(
    LLAMA3_JSON,
    name="llama4_json",
    markers=(BEGIN, END, "<|header_start|>", "<|header_end|>"),
    template_signs=("<|header_start|>", '"parameters"'),
)
