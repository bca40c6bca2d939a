"""A model's output as events, as its text arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from paceline.parsing.events import Content, Event, Reasoning, ToolCall
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools


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
    reader: TextReader,
    reasoning: ReasoningFormat | None,
    tool_format: ToolFormat | None,
    tools: Tools,
    *,
    inside: bool,
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
