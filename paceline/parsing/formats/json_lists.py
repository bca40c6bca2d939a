"""Families that write `[{"name": "f", "arguments": {...}}, ...]` between markers of their own, a table of them.

One object without the list is read, too; GigaChat, Granite 20B and InternLM write nothing else. Apertus has the name
for a key: `{"f": {...}}`.
Cohere, GigaChat and Hunyuan A13B also have markers around the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.parsing.json_text import call_by_name, call_fields, call_list, call_object, json_string, json_value
from paceline.parsing.text_reader import Content, Steps, TextReader
from paceline.parsing.tool_format import JSON_CALL, ToolFormat, Tools

CALLS, CALLS_END = "<tool_calls>", "</tool_calls>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

ReadCall = Callable[[TextReader, Tools], Steps[bool]]


@dataclass(frozen=True, slots=True)
class _Family:
    begins: tuple[str, ...]
    """Before the list; the first is what a grammar writes."""
    end: str = ""
    call: ReadCall = lambda reader, tools: call_object(reader)
    """Consumes one object, see `call_list`."""
    dropped: tuple[str, ...] = ()
    """Markers that are no text."""
    tokens: tuple[str, ...] = ()
    """Texts of the tokens in markers that consist of several."""

    def parse(self, reader: TextReader, tools: Tools) -> Steps[None]:
        while marker := (yield from reader.until((*self.begins, *self.dropped), Content)):
            found = False
            if marker in self.dropped:
                yield from reader.space()
            elif not tools:
                yield Content(reader.since_mark())
            elif marker.endswith("[") or (yield from reader.skip("[")):
                found = yield from call_list(reader, lambda reader: self.call(reader, tools))
            elif not (found := (yield from self.call(reader, tools))):
                yield Content(reader.since_mark())
            if found:
                yield from reader.skip_closing(self.end)

    def tool_format(
        self, name: str, template_signs: tuple[str, ...], call: tuple[str, str, str] = JSON_CALL
    ) -> ToolFormat:
        opening = self.begins[0]
        return ToolFormat(
            name,
            self.parse,
            markers=(*self.begins, self.end, *self.dropped, *self.tokens),
            template_signs=template_signs,
            call=call,
            separator=", ",
            opening=opening if opening.endswith("[") else f"{opening}[",
            closing=f"]{self.end}",
            wraps_content=bool(self.dropped),
        )

    def without_list(
        self, name: str, template_signs: tuple[str, ...], begin: str, middle: str = JSON_CALL[1]
    ) -> ToolFormat:
        """A format with the marker before each call. `begin`: the text before a call's object."""
        listed = self.tool_format(name, template_signs, (begin + JSON_CALL[0], middle, "}" + self.end))
        return replace(listed, separator="", opening="", closing="")


def _named_by_key(reader: TextReader, tools: Tools) -> Steps[bool]:
    yield from reader.space()
    if not (yield from reader.accept("{")):
        return False
    yield from reader.space()
    key = json_string((yield from json_value(reader))) or ""
    found = bool((yield from reader.skip(":"))) and (yield from call_by_name(reader, key))
    if found:
        yield from reader.skip("}")
    return found


def _bare(reader: TextReader, tools: Tools) -> Steps[bool]:
    yield from reader.space()
    return bool((yield from reader.accept("{"))) and (yield from call_fields(reader, names=tools))


def _parse_hunyuan(reader: TextReader, tools: Tools) -> Steps[None]:
    """The markers around the answer are mere text, which an answer may mention.

    So the first one is a marker only at the beginning of the answer, and the second one at its end.
    """
    reader.mark()
    if not (yield from reader.skip(ANSWER)):
        reader.reset()
    while marker := (yield from reader.until((CALLS, ANSWER_END), Content)):
        if marker == CALLS and tools and (yield from reader.skip("[")):
            if (yield from call_list(reader, call_object)):
                yield from reader.skip_closing(CALLS_END)
        elif marker == CALLS or not (yield from _ends(reader)):
            yield Content(reader.since_mark())


def _ends(reader: TextReader) -> Steps[bool]:
    """Whether nothing but white space comes."""
    yield from reader.space()
    return not (yield from reader.peek())


HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b",
    _parse_hunyuan,
    markers=(CALLS, CALLS_END, ANSWER, ANSWER_END),
    template_signs=("<tool_calls>[", "<|extra_0|>"),
    call=JSON_CALL,
    separator=", ",
    opening=f"{CALLS}[",
    closing=f"]{CALLS_END}",
    wraps_content=True,
)
NEMOTRON_JSON = _Family(("<TOOLCALL>",), "</TOOLCALL>").tool_format("nemotron_json", ("<TOOLCALL>",))
APRIEL = _Family((CALLS,), CALLS_END).tool_format("apriel", ("<tool_calls>[",))
GRANITE = _Family(("<|tool_call|>", "<tool_call>")).tool_format("granite", ("<|tool_call|> followed by a JSON list",))
PHI4_MINI = _Family(("<|tool_call|>", "functools["), "<|/tool_call|>").tool_format("phi4_mini_json", ("<|/tool|>",))
APERTUS = _Family(("<|tools_prefix|>",), "<|tools_suffix|>", _named_by_key).tool_format(
    "apertus", ("<|tools_prefix|>",), ('{"', '": ', "}")
)
COHERE_COMMAND3 = _Family(
    ("<|START_ACTION|>",),
    "<|END_ACTION|>",
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
).tool_format(
    "cohere_command3", ("<|START_ACTION|>",), ('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}")
)
XLAM = _Family(("[",), call=_bare).tool_format("xlam", ())
"""Nothing marks its calls but the list itself: a tool must have their names."""
GIGACHAT3 = _Family(
    ("function call<|role_sep|>", "<|function_call|>"), dropped=("<|message_sep|>",), tokens=("<|role_sep|>",)
).without_list("gigachat3", ("<|role_sep|>", "function call"), "<|message_sep|>\n\nfunction call<|role_sep|>\n")
"""A call is a message of its own, behind that of the answer."""
GRANITE_20B_FC = _Family(("<function_call>",)).without_list(
    "granite-20b-fc", ("<|function_call_library|>", "<function_call>"), "<function_call> "
)
INTERNLM = _Family(
    ("<|action_start|><|plugin|>",), "<|action_end|>", tokens=("<|action_start|>", "<|plugin|>")
).without_list("internlm", ("<|action_start|>",), "<|action_start|><|plugin|>\n", '", "parameters": ')
