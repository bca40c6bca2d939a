"""A response's output: items, from what a parser finds in the model's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline_services.gateway.responses.output_items import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
)

Json = dict[str, Any]


class ResponseOutput:
    """Methods yield the events of a stream, without a `sequence_number`."""

    def __init__(self, request_id: str, call_id: Callable[[int], str]) -> None:
        """Ids of items follow from the request's: a response that is generated again has the same ones.

        `call_id`: the id of the index-th call.
        """
        self._request_id = request_id
        self._call_id = call_id
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None

    @property
    def as_json(self) -> list[Json]:
        """The items so far."""
        return [item.as_json for item in self._items]

    def feed(self, event: Event, log_probs: Sequence[Json] = ()) -> Iterator[Json]:
        """Append what the parser has found. `log_probs`: of the tokens of `Content`."""
        match event:
            case Content(text) if text:
                yield from self._switch_to(OutputMessage, "msg")
                yield self._delta(text, log_probs)
            case Reasoning(text) if text:
                yield from self._switch_to(OutputReasoning, "rs")
                yield self._delta(text)
            case ToolCall(index, name):
                yield from self._begin(OutputFunctionCall(self._id("fc"), len(self._items), self._call_id(index), name))
            case ToolArguments(_, text) if text and isinstance(self._open, OutputFunctionCall):
                yield self._delta(text)

    def close(self, status: str, log_probs: Sequence[Json] = ()) -> Iterator[Json]:
        """End the last item. `status`: completed or incomplete. `log_probs`: of tokens without a text."""
        item, self._open = self._open, None
        if isinstance(item, OutputMessage):
            item.log_probs += log_probs
        if item is not None:
            yield from item.done(status)

    def _switch_to(self, kind: type[OutputMessage | OutputReasoning], prefix: str) -> Iterator[Json]:
        """Begin an item of this kind, unless the last one is of it and open."""
        if not isinstance(self._open, kind):
            yield from self._begin(kind(self._id(prefix), len(self._items)))

    def _begin(self, item: OutputItem) -> Iterator[Json]:
        yield from self.close("completed")
        self._items.append(item)
        self._open = item
        yield from item.added()

    def _delta(self, text: str, log_probs: Sequence[Json] = ()) -> Json:
        assert self._open is not None
        return self._open.delta(text, log_probs)

    def _id(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self._request_id}_{len(self._items)}"
