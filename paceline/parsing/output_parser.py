"""A model's output as events, as its text arrives."""

from __future__ import annotations

from collections.abc import Collection

from paceline.parsing.events import Content, Event
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.text_reader import Steps, TextReader
from paceline.parsing.tool_format import ToolFormat


class OutputParser:
    """Parses one output: reasoning first, then content and tool calls."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        *,
        names: Collection[str] = (),
        inside: bool = False,
    ) -> None:
        """None: the text has no such part. `names`: of the request's tools. `inside`: see `begins_inside`."""
        self._reader = TextReader()
        self._steps = _message(self._reader, reasoning, tools, names, inside)

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """The events that this text completes. `last`: no more will come."""
        self._reader.add(text, last=last)
        events = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events


def _message(
    reader: TextReader,
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None,
    names: Collection[str],
    inside: bool,
) -> Steps[None]:
    reasoned = reasoning is not None and (yield from reasoning.parse(reader, inside=inside))
    if tools is not None:
        yield from tools.parse(reader, names, reasoned)
    else:
        yield from reader.until((), Content, after_marker=reasoned)
