"""Hunyuan A13B: `<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>`, in `<answer>` and `</answer>`.

The markers around the answer are mere text, which an answer may mention. So the first one is a marker only at the
beginning of the answer, and the second one at its end.
"""

from __future__ import annotations

from paceline.parsing.json_text import call_object
from paceline.parsing.object_calls import call_list
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import JSON_CALL, ToolFormat, Tools

BEGIN, END = "<tool_calls>", "</tool_calls>"
ANSWER, ANSWER_END = "<answer>", "</answer>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    reader.mark()
    if not (yield from reader.skip(ANSWER)):
        reader.reset()
    while marker := (yield from reader.until((BEGIN, ANSWER_END), Content)):
        if marker == BEGIN and tools and (yield from reader.skip("[")):
            if (yield from call_list(reader, call_object)):
                yield from reader.skip_closing(END)
        elif marker == BEGIN or not (yield from _ends(reader)):
            yield Content(reader.since_mark())


def _ends(reader: TextReader) -> Steps[bool]:
    """Whether nothing but white space comes."""
    yield from reader.space()
    return not (yield from reader.peek())


HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b",
    parse,
    markers=(BEGIN, END, ANSWER, ANSWER_END),
    template_signs=("<tool_calls>[", "<|extra_0|>"),
    call=JSON_CALL,
    separator=", ",
    opening=f"{BEGIN}[",
    closing=f"]{END}",
    wraps_content=True,
)
