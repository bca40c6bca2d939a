"""Calls: `<invoke name="f">`, `<parameter name="a">1</parameter>`, ..., `</invoke>`, with markers around all calls.

At the end a table of the families that write them. DeepSeek's versions differ in the name of the element around all
calls; V4.1 has spaces behind the token. MiniCPM5 writes `<function name="f"><param name="a">1</param></function>`,
values with or without `<![CDATA[...]]>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from paceline.parsing.tagged_arguments import PYTHON_TYPES, Argument, Tags, argument_types, tagged_call
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

QUOTED = re.compile(r'[^"<>\n]+')
STRING = ' string="'
"""The attribute that says whether a value is a text or JSON."""


@dataclass(frozen=True, slots=True)
class InvokeTags:
    """The markers of a family."""

    section: str
    """Around all calls, with a slash behind its first character at the end."""
    prefix: str = ""
    """Before the other markers' names."""

    @property
    def section_end(self) -> str:
        return self.section.replace("<", "</", 1)

    @property
    def invoke(self) -> str:
        return f'<{self.prefix}invoke name="'

    @property
    def parameter(self) -> str:
        return f'<{self.prefix}parameter name="'

    def end(self, name: str) -> str:
        """The marker behind an element with this name."""
        return f"</{self.prefix}{name}>"

    def arguments(self) -> Tags:
        """A model may forget the end of a value: then the end of a call stands before another one."""
        invoke_end = self.end("invoke")
        ends = {self.end("parameter"): (self.parameter, invoke_end), invoke_end: (self.invoke, self.section_end)}
        return Tags(self.parameter, _head, ends, invoke_end)

    def tool_format(self, name: str, markers: tuple[str, ...], template_signs: tuple[str, ...]) -> ToolFormat:
        return ToolFormat(
            name,
            partial(parse, self, self.arguments()),
            markers=markers,
            template_signs=template_signs,
            call=(self.invoke, '">\n', f"\n{self.end('invoke')}\n"),
            opening=f"{self.section}\n",
            closing=self.section_end,
        )


def parse(tags: InvokeTags, arguments: Tags, reader: TextReader, tools: Tools) -> Steps[None]:
    """A model may forget the marker before all calls. Then a tool must have the call's name."""
    section = False
    while marker := (yield from reader.until((tags.section, tags.invoke), Content)):
        section = section or marker == tags.section
        begun = marker == tags.invoke or (yield from reader.skip(tags.invoke))
        name = (yield from reader.run(QUOTED)) if begun else ""
        end = (yield from reader.accept('">', '"/>')) if name in tools or section else ""
        if end == '"/>':
            yield reader.call(name)
            yield reader.arguments("{}")
        elif not end or not (yield from tagged_call(reader, name, tools.get(name, {}), arguments)):
            yield Content(reader.since_mark())
            continue
        yield from reader.skip_closing(tags.section_end)


def _head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key = yield from reader.run(QUOTED)
    if not key or not (yield from reader.accept_cut('"')):
        return None
    types = argument_types(schema, key)
    if (yield from reader.accept(STRING)):
        text = yield from reader.run(QUOTED)
        types = ("string",) if text == "true" else tuple(PYTHON_TYPES)
        yield from reader.accept_cut('"')
    return (key, types) if (yield from reader.accept_cut(">")) else None


TOKEN = "｜DSML｜"

DEEPSEEK_V32 = InvokeTags(f"<{TOKEN}function_calls>", TOKEN).tool_format(
    "deepseek_v32", markers=(TOKEN,), template_signs=(TOKEN, "function_calls>")
)
DEEPSEEK_V41 = InvokeTags(f"<{TOKEN} calls>", f"{TOKEN} ").tool_format(
    "deepseek_v41", markers=(TOKEN,), template_signs=(TOKEN, " calls>")
)
DEEPSEEK_V4 = InvokeTags(f"<{TOKEN}tool_calls>", TOKEN).tool_format(
    "deepseek_v4", markers=(TOKEN,), template_signs=(TOKEN, "tool_calls>")
)


TAGS = InvokeTags("<minimax:tool_call>")
MINIMAX_M2 = TAGS.tool_format(
    "minimax_m2", markers=(TAGS.section, TAGS.section_end), template_signs=("minimax:tool_call", "invoke name=")
)


FUNCTION, FUNCTION_END = '<function name="', "</function>"
PARAMETER, PARAMETER_END = '<param name="', "</param>"
CDATA, CDATA_END = "<![CDATA[", "]]>"


def parse_minicpm(reader: TextReader, tools: Tools) -> Steps[None]:
    """No token marks a call: a tool must have the function's name."""
    while (yield from reader.until((FUNCTION,), Content)):
        name = yield from reader.run(QUOTED)
        known = name in tools and (yield from reader.accept('">'))
        if not known or not (yield from tagged_call(reader, name, tools[name], MINICPM_TAGS)):
            yield Content(reader.since_mark())


def _param_head(reader: TextReader, schema: JsonSchema) -> Steps[Argument | None]:
    key = yield from reader.run(QUOTED)
    if not key or not (yield from reader.accept_cut('">')):
        return None
    yield from reader.accept(CDATA)
    return key, argument_types(schema, key)


BEHIND = (PARAMETER, FUNCTION_END)
MINICPM_TAGS = Tags(PARAMETER, _param_head, {CDATA_END + PARAMETER_END: BEHIND, PARAMETER_END: BEHIND}, FUNCTION_END)
MINICPM5 = ToolFormat(
    "minicpm5", parse_minicpm, markers=(), template_signs=(FUNCTION, PARAMETER), call=(FUNCTION, '">', FUNCTION_END)
)
