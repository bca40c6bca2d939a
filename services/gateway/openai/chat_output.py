"""A completion's output as OpenAI's chat message: whole, or as the deltas of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

from paceline.core.messages import Delta, FinishReason
from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall

Json = dict[str, Any]

TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of a message that calls tools by the model's own choice."""


def call_id(request_id: str, index: int) -> str:
    """The id of a request's call. It is derived, so that a resumed stream repeats it."""
    return f"call_{blake2b(f'{request_id}/{index}'.encode(), digest_size=12).hexdigest()}"


def joined_events(events: Sequence[Event]) -> Iterator[Event]:
    """The events, with adjacent texts of one kind as one."""
    if len(events) < 2:
        yield from events
        return
    for _, group in groupby(events, key=_kind):
        first, *others = group
        if isinstance(first, ToolCall):
            yield first
        else:
            text = "".join([first.text, *(each.text for each in others if not isinstance(each, ToolCall))])
            yield ToolArguments(first.index, text) if isinstance(first, ToolArguments) else type(first)(text)


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, ToolCall | ToolArguments) else 0


@dataclass(slots=True)
class ChatOutput:
    """One completion. Its events come in any number of parts."""

    request_id: str
    with_reasoning: bool = True
    """Whether the client wants to see the reasoning."""
    forced: bool = False
    """Whether the request names the function that the model must call."""
    _arguments: list[str] | None = field(default=None, init=False)
    """Of the latest call so far; None: there was no call."""

    def deltas(self, events: Sequence[Event]) -> list[Json]:
        """The `delta`s of a stream for the next events."""
        return [self._delta(event) for event in self._visible(events)]

    def message(self, events: Sequence[Event]) -> Json:
        """The `message` for the whole output. Fields of parts that the output does not have are left out."""
        content, reasoning = "", ""
        calls: dict[int, Json] = {}
        for event in self._visible(events):
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case ToolCall(index, name):
                    calls[index] = self._call(index, name)
                case ToolArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        return {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
            **(_reasoning(reasoning) if reasoning else {}),
            **({"tool_calls": list(calls.values())} if calls else {}),
        }

    def finish_reason(self, delta: Delta) -> str | None:
        """OpenAI's finish reason, after all events.

        It is `tool_calls` if the model called a tool, unless the request named the tool, or a stop of the client's cut
        the call off: a client would run it.
        """
        if delta.finish_reason is not FinishReason.STOP or self._arguments is None or self.forced:
            return delta.finish_reason
        cut = delta.stop_reason is not None and not _is_json("".join(self._arguments))
        return FinishReason.STOP if cut else TOOL_CALLS

    def _visible(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in joined_events(events):
            match event:
                case ToolCall():
                    self._arguments = []
                case ToolArguments(_, text) if self._arguments is not None:
                    self._arguments.append(text)
            if self.with_reasoning or not isinstance(event, Reasoning):
                yield event

    def _delta(self, event: Event) -> Json:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return _reasoning(text)
            case ToolCall(index, name):
                return {"tool_calls": [{"index": index, **self._call(index, name)}]}
            case ToolArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, index: int, name: str) -> Json:
        id_ = call_id(self.request_id, index)
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": ""}}


def _reasoning(text: str) -> Json:
    """Under the name that most servers use, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
