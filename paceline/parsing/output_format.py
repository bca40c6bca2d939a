"""How a model's output is to be read, chosen by name or by its chat template, and the parser that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from paceline.parsing import formats
from paceline.parsing.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from paceline.parsing.formats.glm import GLM45, GLM47
from paceline.parsing.formats.harmony import OPENAI
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.formats.llama3_json import LLAMA3_JSON, LLAMA4_JSON
from paceline.parsing.formats.mistral import MISTRAL, MISTRAL_V11
from paceline.parsing.formats.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from paceline.parsing.formats.qwen3_coder import QWEN3_CODER, QWEN3_XML
from paceline.parsing.reasoning import HARMONY_REASONING, REASONING_FORMATS, ReasoningFormat
from paceline.parsing.text_reader import Content, Event, Reasoning, Steps, TextReader, ToolCall
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"

GENERAL = (
    *(GLM45, GLM47, QWEN3_CODER, QWEN3_XML, HERMES, OPENAI, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL_V11, MISTRAL),
    *(LLAMA4_PYTHONIC, PYTHONIC, LLAMA4_JSON, LLAMA3_JSON),
)
"""Formats whose signs other families' templates have, too: compared with a chat template last, in this order."""


def _special() -> Iterator[ToolFormat]:
    """Every other format in the files of `formats`, in the order of the files and within them."""
    for file in iter_modules(formats.__path__):
        values = vars(import_module(f"{formats.__name__}.{file.name}")).values()
        yield from (each for each in values if isinstance(each, ToolFormat) and each not in GENERAL)


DETECTED = (*dict.fromkeys(_special()), *GENERAL)
"""In the order in which a chat template is compared with them."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in DETECTED}
"""By name; of two with one name the one for older models."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and tool calls. None: it does not, or nobody is to look for them."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of tokens that a parser must see, also those that are special tokens."""
        reasoning = self.reasoning.markers if self.reasoning is not None else ()
        return (*reasoning, *(self.tools.markers if self.tools is not None else ()))

    def begins_inside(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer to this rendered prompt begins with reasoning, or in it.

        `continued`: the text that the answer continues, if there is one.
        """
        if self.reasoning is None or not continued:
            return self.reasoning is not None and self.reasoning.begins_inside(prompt)
        return continued.rfind(self.reasoning.begin) > continued.rfind(self.reasoning.end)

    def parser(self, tools: Tools, *, inside: bool = False) -> OutputParser:
        """A parser of one output. `tools`: that the request lets the model call; none: calls are not looked for."""
        form = self.tools
        wanted = form is not None and (bool(tools) or form.reads_every_text)
        return OutputParser(self.reasoning, form if wanted else None, tools=tools, inside=inside)


def choose_format(tool_call_parser: str, reasoning_parser: str, chat_template: str | None) -> OutputFormat:
    """The formats with these names. "auto": that of the chat template, if it is known; "none": none.

    Raises ValueError for an unknown name, and for gpt-oss's format with another one.
    """
    tools = _choose("tool_call_parser", tool_call_parser, DETECTED, chat_template)
    reasoning = _choose("reasoning_parser", reasoning_parser, tuple(REASONING_FORMATS.values()), chat_template)
    if tool_call_parser == AUTO and reasoning is HARMONY_REASONING:
        tools = OPENAI
    if reasoning_parser == AUTO and tools is OPENAI:
        reasoning = HARMONY_REASONING
    if (tools is OPENAI) != (reasoning is HARMONY_REASONING):
        raise ValueError(
            f"tool_call_parser {OPENAI.name} and reasoning_parser {HARMONY_REASONING.name} are one format: "
            f"choose both, or neither ({NONE})"
        )
    return OutputFormat(reasoning, tools)


def _choose(field: str, name: str, formats: Sequence[Format], chat_template: str | None) -> Format | None:
    named = [each for each in formats if name in (each.name, AUTO)]
    if not named and name != NONE:
        names = ", ".join(sorted({each.name for each in formats}))
        raise ValueError(f"{field} must be one of {AUTO}, {NONE}, {names}, not {name!r}")
    # templates write texts in either kind of quotes, with the other kind as it is and their own behind a backslash
    template = (chat_template or "").replace("\\", "")
    shown = [each for each in named if each.template_signs and all(sign in template for sign in each.template_signs)]
    fallback = None if name == AUTO or not named else named[-1]
    return shown[0] if shown else fallback


class OutputParser:
    """Parses one output: reasoning first, then content and tool calls. `OutputFormat.parser` makes one."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        *,
        tools: Mapping[str, JsonSchema] | None = None,
        inside: bool = False,
    ) -> None:
        """None: the text has no such part. `tools`: of the request. `inside`: see `begins_inside`."""
        self.in_reasoning = False
        """Whether the text so far ends amid reasoning of which there was an event."""
        self._reader = TextReader()
        self._steps = _message(self._reader, reasoning, tool_format, tools or {}, inside=inside)

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """The events that this text completes; none is empty. `last`: no more text will come."""
        self._reader.add(text, last=last)
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            self.in_reasoning = isinstance(event, Reasoning) and event.text != ""
            if isinstance(event, ToolCall) or event.text:
                events.append(event)
        return events


def _message(
    reader: TextReader, reasoning: ReasoningFormat | None, tool_format: ToolFormat | None, tools: Tools, *, inside: bool
) -> Steps[None]:
    answer: Callable[[], Steps[object]] = partial(reader.until, (), Content)
    if tool_format is not None:
        answer = partial(tool_format.parse, reader, tools)
    left_to_tools = tool_format is not None and tool_format.reads_reasoning and not inside
    if reasoning is not None and not left_to_tools and (yield from reasoning.begins(reader, inside=inside)):
        opening = "" if tool_format is None or tool_format.reads_reasoning else tool_format.first_marker
        wrapped = tool_format is not None and tool_format.wraps_content
        if (yield from reasoning.parse(reader, opening, answer, wrapped=wrapped)):
            return
    yield from answer()
