"""Calls as a list in Python: `[f(a=1, b="x"), g()]`, with Llama 4 between `<|python_start|>` and `<|python_end|>`.

A bare list may as well be the answer: its calls are calls only if tools have their names. LFM2 writes such a list
between `<|tool_call_start|>` and `<|tool_call_end|>`; OLMo 3 a call a line, between `<function_calls>` and
`</function_calls>`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from paceline.parsing.json_text import ValueScan, call_list, call_object
from paceline.parsing.tagged_arguments import keywords_json
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN, END = "<|python_start|>", "<|python_end|>"


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while marker := (yield from reader.until((BEGIN, "["), Content)):
        if marker == BEGIN:
            yield from reader.skip("[")
        names = tools if marker == "[" else None
        yield from call_list(reader, partial(python_call, names=names))
        yield from reader.skip_closing(END)


def python_call(reader: TextReader, *, names: Collection[str] | None) -> Steps[bool | None]:
    """One call, see `call_list`. `names`: nothing else says that it is a call, so it needs one of these.

    Its arguments become JSON when it is closed, so there are no parts of them.
    """
    yield from reader.space()
    name = yield from reader.run(NAME)
    known = names is None or name in names
    if not name or not known or not (yield from reader.accept("(")):
        return False
    scan = ValueScan(quotes="'\"", depth=1)
    text = yield from reader.scan(scan.find_end)
    if scan.depth:
        return False
    arguments = keywords_json(text.removesuffix(")"))
    if arguments is None:
        return None
    yield reader.call(name)
    yield reader.arguments(arguments)
    return True


PYTHONIC = ToolFormat(
    "pythonic",
    parse,
    markers=(),
    template_signs=("[func_name1(",),
    call=("", "(", ")"),
    separator=", ",
    opening="[",
    closing="]",
)
LLAMA4_PYTHONIC = replace(
    PYTHONIC, name="llama4_pythonic", markers=(BEGIN, END), template_signs=("<|header_start|>", "[func_name1(")
)


LFM2_BEGIN, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"


def parse_lfm2(reader: TextReader, tools: Tools) -> Steps[None]:
    """Asked for JSON, LFM2 writes objects in place of the calls."""
    while (yield from reader.until((LFM2_BEGIN,), Content)):
        if (yield from reader.skip("[")):
            call = call_object if (yield from reader.peek()) == "{" else partial(python_call, names=None)
            found = yield from call_list(reader, call)
        elif not (found := (yield from call_object(reader))):
            yield Content(reader.since_mark())
        if found:
            yield from reader.skip_closing(LFM2_END)


def parse_olmo3(reader: TextReader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((OLMO_BEGIN,), Content)):
        first = reader.calls
        while (yield from python_call(reader, names=None)):
            yield from reader.skip(",")
            if (yield from reader.next_of(OLMO_END)) or reader.ends_before(OLMO_END):
                break
            reader.mark()
        else:
            yield Content(reader.since_mark())
        if reader.calls > first:
            yield from reader.skip_closing(OLMO_END)


LFM2 = ToolFormat(
    "lfm2",
    parse_lfm2,
    markers=(LFM2_BEGIN, LFM2_END),
    template_signs=(LFM2_BEGIN,),
    call=("", "(", ")"),
    separator=", ",
    opening=LFM2_BEGIN + "[",
    closing="]" + LFM2_END,
)
OLMO3 = ToolFormat(
    "olmo3",
    parse_olmo3,
    markers=(OLMO_BEGIN, OLMO_END),
    template_signs=(OLMO_BEGIN, OLMO_END),
    call=("", "(", ")"),
    separator="\n",
    opening=OLMO_BEGIN,
    closing=OLMO_END,
)
