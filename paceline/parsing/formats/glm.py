"""GLM 4.5 and newer: `<tool_call>f`, `<arg_key>a</arg_key>`, `<arg_value>1</arg_value>`, ..., `</tool_call>`.

GLM 4.5 and 4.6 have line breaks between them, later models have none. Hunyuan 3 and 4 put `<tool_sep>` behind the name,
`<tool_calls>` around all calls, and a suffix into each marker, as in `<arg_key:opensource>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.parsing.tagged_arguments import Argument, Tags, argument_types, tagged_call
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools


def parse(suffix: str, reader: TextReader, tools: Tools) -> Steps[None]:
    """`suffix`: in each marker. The markers of Hunyuan may be missing.

    A word without arguments has to be a tool's name.
    """
    calls, calls_end, begin, separator = _markers(suffix, "<tool_calls", "</tool_calls", "<tool_call", "<tool_sep")
    tags = _tags(suffix)
    while marker := (yield from reader.until((calls, begin), Content)):
        begun = marker == begin or (yield from reader.skip(begin))
        yield from reader.space()
        name = (yield from reader.run(NAME)) if begun else ""
        yield from reader.skip(separator)
        known = name in tools or (yield from reader.next_of("{", tags.begin))
        if known and (yield from tagged_call(reader, name, tools.get(name, {}), tags)):
            yield from reader.skip_closing(calls_end)
        else:
            yield Content(reader.since_mark())


def _markers(suffix: str, *names: str) -> Sequence[str]:
    return [f"{name}{suffix}>" for name in names]


def _tags(suffix: str) -> Tags:
    """A model may forget the end of a value: then the end of a call stands before another one."""
    begin, end, key, key_end = _markers(suffix, "<tool_call", "</tool_call", "<arg_key", "</arg_key")
    value, value_end, calls_end = _markers(suffix, "<arg_value", "</arg_value", "</tool_calls")

    def head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
        text, marker = yield from reader.text_until((key_end, key, value, end))
        yield from reader.space()
        whole = marker == key_end and (yield from reader.accept_cut(value))
        return (text.strip(), argument_types(schema, text.strip())) if whole else None

    return Tags(key, head, {value_end: (key, end), end: (begin, calls_end)}, end)


GLM45 = ToolFormat(
    "glm45",
    partial(parse, ""),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    template_signs=("<tool_call>", "</arg_key>\n<arg_value>"),
    call=("<tool_call>", "\n", "\n</tool_call>"),
    separator="\n",
)
GLM47 = replace(
    GLM45,
    name="glm47",
    template_signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    call=("<tool_call>", "", "</tool_call>"),
    separator="",
)


def _hunyuan(name: str, suffix: str, template_signs: tuple[str, ...]) -> ToolFormat:
    calls, calls_end, separator = _markers(suffix, "<tool_calls", "</tool_calls", "<tool_sep")
    return ToolFormat(
        name,
        partial(parse, suffix),
        markers=(calls, calls_end, separator, *_markers(suffix, *(marker[:-1] for marker in GLM45.markers))),
        template_signs=template_signs,
        call=(
            f"<tool_call{suffix}>",
            separator + "\n",
            f"\n</tool_call{suffix}>\n",
        ),  # a grammar cannot tell a line break from one that begins a marker
        opening=calls + "\n",
        closing=calls_end,
    )


HY_V3_PREVIEW = _hunyuan("hy_v3", "", ("<tool_sep>", "<arg_key>"))
HY_V3 = _hunyuan("hy_v3", ":opensource", ("arg_key", ":opensource"))
HY_V4 = _hunyuan("hy_v4", ":6124c78e", ("arg_key", ":6124c78e"))
