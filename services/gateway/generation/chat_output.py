"""A completion's output as OpenAI's chat message: whole, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from paceline.messages import FinishReason
from paceline.output_processor import TextDelta
from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline.parsing.json_text import is_json
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.tool_bodies import NamedToolChoice
from paceline_services.gateway.http.json_body import Json

TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of a message that calls tools by the model's own choice."""


class ChatOutput:
    """One completion of a chat. Its deltas are given in order, each to one method, once."""

    def __init__(self, body: ChatBody, request: CompletionRequest, model: ServedModel) -> None:
        self._request = request
        self._format = model.output_format.tools
        self._with_reasoning = body.include_reasoning is not False
        self._parallel = body.parallel_tool_calls is not False
        self._named = isinstance(body.tool_choice, NamedToolChoice)
        self._arguments: list[str] | None = None  # of the latest call so far; None: there was no call

    def events(self, delta: TextDelta) -> list[Event]:
        """What the client is to see of a delta, with adjacent texts of one kind as one.

        `parallel_tool_calls: false` leaves out every call but the first, as in vLLM.
        """
        if self._request.output.parser is None:
            return [Content(delta.text)] if delta.text else []
        events = [event for event in _joined(delta.events) if self._visible(event)]
        for event in events:
            if isinstance(event, ToolCall):
                self._arguments = []
            elif isinstance(event, ToolArguments) and self._arguments is not None:
                self._arguments.append(event.text)
        return events

    def deltas(self, delta: TextDelta) -> list[Json]:
        """The `delta`s of a stream's chunks."""
        return [self._delta(event) for event in self.events(delta)]

    def message(self, output: TextDelta) -> Json:
        """The `message` for the whole output. Fields of parts that the output does not have are left out."""
        content, reasoning = "", ""
        calls: dict[int, Json] = {}
        for event in self.events(output):
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

    def finish_reason(self, last: TextDelta) -> str | None:
        """OpenAI's finish reason, after all events.

        It is `tool_calls` if the model called a tool, unless the request named the tool, or a stop of the client's cut
        the call off: a client would run it.
        """
        if last.finish_reason is not FinishReason.STOP or self._arguments is None or self._named:
            return last.finish_reason
        cut = last.stop_reason is not None and not is_json("".join(self._arguments))
        return FinishReason.STOP if cut else TOOL_CALLS

    def call_id(self, index: int) -> str:
        """The id of the index-th call."""
        assert self._format is not None, "only a format of calls finds calls"
        return self._format.call_id(self._request.request_id, index)

    def _visible(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._with_reasoning
        return self._parallel or isinstance(event, Content) or event.index == 0

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
        return {"id": self.call_id(index), "type": "function", "function": {"name": name, "arguments": ""}}


def _joined(events: Sequence[Event]) -> Iterator[Event]:
    for _, group in groupby(events, key=_kind):
        first, *others = group
        if isinstance(first, ToolCall) or not others:
            yield first
        else:
            text = "".join([first.text, *(each.text for each in others if not isinstance(each, ToolCall))])
            yield ToolArguments(first.index, text) if isinstance(first, ToolArguments) else type(first)(text)


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, ToolCall | ToolArguments) else 0


def _reasoning(text: str) -> Json:
    """Under the name that most servers use, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}
