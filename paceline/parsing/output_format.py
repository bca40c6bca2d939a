"""How a model's output is to be read: chosen by name or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_parser import OutputParser
from paceline.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from paceline.parsing.tool_format import ToolFormat

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"
TOOL_FORMATS: Mapping[str, ToolFormat] = {HERMES.name: HERMES}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and tool calls. None: it does not, or nobody is to look for them."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of tokens that a parser must see, also those that are special tokens."""
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return (*reasoning, *(self.tools.markers if self.tools is not None else ()))

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins with reasoning."""
        return self.reasoning is not None and self.reasoning.begins_inside(prompt)

    def parser(self, tools: Mapping[str, Mapping[str, Any]], *, inside: bool = False) -> OutputParser:
        """A parser of one output. `tools`: that the request lets the model call; none: calls are not looked for."""
        wanted = bool(tools) or (self.tools is not None and self.tools.reads_reasoning)
        return OutputParser(self.reasoning, self.tools if wanted else None, names=tuple(tools), inside=inside)


def choose_format(tool_call_parser: str, reasoning_parser: str, chat_template: str | None) -> OutputFormat:
    """The formats with these names. "auto": that of the chat template, if it is known; "none": none.

    Raises ValueError for an unknown name.
    """
    source = chat_template or ""
    tools = (each for each in TOOL_FORMATS.values() if all(sign in source for sign in each.template_signs))
    reasoning = (each for each in REASONING_FORMATS.values() if not each.always and each.end in source)
    return OutputFormat(
        next(reasoning, None) if reasoning_parser == AUTO else _named(reasoning_parser, REASONING_FORMATS),
        next(tools, None) if tool_call_parser == AUTO else _named(tool_call_parser, TOOL_FORMATS),
    )


def _named(name: str, formats: Mapping[str, Format]) -> Format | None:
    if name != NONE and name not in formats:
        raise ValueError(f"{name} is none of {', '.join(formats)}")
    return formats.get(name)
