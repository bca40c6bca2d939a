"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, line breaks between them.

Values are plain text. The tool's schema says which of them are numbers, lists and so on. Seed-OSS:
`<seed:tool_call><function=f>`, and the same parameters in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.parsing.json_text import call_arguments
from paceline.parsing.tagged_arguments import Argument, Tags, argument_types, quoted, tagged_call, value_json
from paceline.parsing.text_reader import SPACE, Content, Steps, TextReader, ToolArguments
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
BEHIND_VALUE = (PARAMETER, FUNCTION_END, END)
"""What may come behind a parameter."""
VALUE_ENDS = (PARAMETER_END, *BEHIND_VALUE, BEGIN)
"""A model may forget the first, and more of them."""
NEXT_MARKERS: Mapping[str, tuple[str, ...]] = {
    PARAMETER_END: BEHIND_VALUE,
    FUNCTION_END: (END, FUNCTION),
    END: (FUNCTION,),
    BEGIN: (FUNCTION,),
}
"""Markers that prove the marker before them to be one, rather than a quotation."""
KEY = re.compile(r"[^<>\n]+")


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """A model may forget `<tool_call>`, too. Then a tool must have the function's name."""
    marker, following = (yield from reader.until((BEGIN, FUNCTION), Content)), ""
    while marker:
        begun = marker == FUNCTION or (yield from reader.skip(FUNCTION))
        name = (yield from reader.run(KEY)).strip() if begun else ""
        known = name in tools or (name != "" and marker == BEGIN)
        if known and (yield from reader.accept(">")):
            yield reader.call(name)
            following = yield from _arguments(reader, tools.get(name, {}))
        else:
            yield Content(following + reader.since_mark())
            following = ""
        marker = following or (yield from reader.until((BEGIN, FUNCTION), Content))


def _arguments(reader: TextReader, schema: JsonSchema) -> Steps[str]:
    """Up to the end of the call. Arguments that the end of the text cuts off stay open.

    Text between parameters is content, and comes behind the call: its events are not to be mixed with others.
    Returns the marker of the next call if it comes in place of this one's end; "": it does not.
    """
    yield from reader.space()
    if (yield from reader.peek()) == "{":  # a grammar writes JSON
        yield from call_arguments(reader)
        yield from reader.skip_closing(FUNCTION_END)
        yield from reader.skip_closing(END)
        return ""
    before = "{"
    between, marker = yield from _behind_value(reader)
    while marker == PARAMETER:
        reader.commit()
        key = (yield from reader.run(KEY)).strip()
        yield from reader.accept(">")
        yield reader.arguments(f"{before}{quoted(key)}: ")
        before = ", "
        marker = yield from _value(reader, argument_types(schema, key))
        if marker == PARAMETER_END:
            text, marker = yield from _behind_value(reader)
            between += text
    if marker:
        yield reader.arguments("{}" if before == "{" else "}")
    yield Content(between)
    reader.mark()
    if marker in (BEGIN, FUNCTION):
        return marker
    yield from reader.skip_closing(END)
    return ""


def _behind_value(reader: TextReader) -> Steps[tuple[str, str]]:
    """Consume the text before the next marker, and the marker; return both."""
    text, marker = "", (yield from reader.skip_closing(*BEHIND_VALUE))
    if not marker:
        text, marker = yield from reader.text_until((*BEHIND_VALUE, BEGIN, FUNCTION))
    return (text.rstrip() if marker else text), marker


def _value(reader: TextReader, types: Sequence[str]) -> Steps[str]:
    """One value, without the line breaks next to its markers; a text as it arrives. Returns the last marker read."""
    in_lines = bool((yield from reader.accept("\n")))
    if set(types) != {"string"}:
        text, marker = yield from _typed_text(reader, in_lines=in_lines)
        yield reader.arguments(value_json(text.removesuffix("\n"), types) if marker else text)
        return marker
    yield reader.arguments('"')

    def event(text: str) -> ToolArguments:
        return reader.arguments(quoted(text)[1:-1])

    while marker := (yield from reader.until(VALUE_ENDS, event)):
        gap = reader.gap
        if last := (yield from _end(reader, marker, in_lines=in_lines)):
            yield reader.arguments(quoted(gap.removesuffix("\n"))[1:])
            return last
        yield event(reader.since_mark())
    return ""


def _typed_text(reader: TextReader, *, in_lines: bool) -> Steps[tuple[str, str]]:
    """The text of a value that is complete before it can be JSON, and the last marker read."""
    parts = []
    while True:
        text, marker = yield from reader.text_until(VALUE_ENDS)
        parts.append(text)
        reader.mark()
        last = (yield from _end(reader, marker, in_lines=in_lines)) if marker else ""
        if last or not marker:
            return "".join(parts), last
        parts.append(marker + reader.since_mark())


def _end(reader: TextReader, marker: str, *, in_lines: bool) -> Steps[str]:
    """The last marker read, if this one ends the value; "": it is quoted in it.

    A value that begins a line (`in_lines`) ends one. Another end needs a marker behind it, or the end of the text.
    """
    if marker != BEGIN and reader.begins_line:
        return marker
    if marker == PARAMETER:
        return "" if in_lines else marker
    if marker == BEGIN and not reader.begins_line:
        return ""
    space = yield from reader.run(SPACE)
    next_marker = yield from reader.accept(*NEXT_MARKERS[marker])
    ended = marker != BEGIN and (not (yield from reader.peek()) or (not in_lines and "\n" in space))
    return next_marker or (marker if ended else "")


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    parse,
    markers=(BEGIN, END),
    template_signs=(BEGIN, FUNCTION, PARAMETER),
    call=(f"{BEGIN}\n{FUNCTION}", ">\n", f"\n{FUNCTION_END}\n{END}"),
    separator="\n",
)
QWEN3_XML = replace(QWEN3_CODER, name="qwen3_xml")


SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"


def parse_seed(reader: TextReader, tools: Tools) -> Steps[None]:
    """A model may forget `<seed:tool_call>`. Then a tool must have the function's name."""
    while marker := (yield from reader.until((SEED_BEGIN, FUNCTION), Content)):
        begun = marker == FUNCTION or (yield from reader.skip(FUNCTION))
        name = (yield from reader.run(KEY)) if begun else ""
        known = (name in tools or marker == SEED_BEGIN) and (yield from reader.accept(">"))
        if known and (yield from tagged_call(reader, name, tools.get(name, {}), TAGS)):
            yield from reader.skip_closing(SEED_END)
        else:
            yield Content(reader.since_mark())


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key = yield from reader.run(KEY)
    return (key, argument_types(schema, key)) if key and (yield from reader.accept_cut(">")) else None


TAGS = Tags(
    PARAMETER,
    _head,
    {PARAMETER_END: (PARAMETER, FUNCTION_END), FUNCTION_END: (SEED_END, FUNCTION, SEED_BEGIN)},
    FUNCTION_END,
)
"""A model may forget the end of a value."""
SEED_OSS = ToolFormat(
    "seed_oss",
    parse_seed,
    markers=(SEED_BEGIN, SEED_END),
    template_signs=(SEED_BEGIN, FUNCTION, PARAMETER),
    call=(f"{SEED_BEGIN}\n{FUNCTION}", ">\n", f"\n{FUNCTION_END}\n{SEED_END}"),
    separator="\n",
)
