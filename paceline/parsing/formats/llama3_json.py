"""Llama 3 and 4: `{"name": "f", "parameters": {...}}`, several separated by ";".

Behind `<|python_tag|>` such an object is a call. A bare one may as well be the answer: it is a call only if a tool has
its name. https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

from dataclasses import replace

from paceline.parsing.events import Content
from paceline.parsing.json_text import call_fields, call_object
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

TAG, BEGIN, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    index = 0
    while marker := (yield from reader.until((TAG, BEGIN, "{"), Content)):
        bare = marker == "{"
        if (yield from call_fields(reader, index, names=tools) if bare else call_object(reader, index)):
            index += 1
            yield from reader.skip_closing(END)
            yield from reader.skip(";")
        else:
            yield Content(reader.since_mark())


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    parse,
    markers=(TAG,),
    template_signs=("<|start_header_id|>", '"parameters"'),
    begin='{"name": "',
    middle='", "parameters": ',
    end="}",
    separator="; ",
)
LLAMA4_JSON = replace(
    LLAMA3_JSON, name="llama4_json", markers=(BEGIN, END), template_signs=("<|header_start|>", '"parameters"')
)
