"""A response's output: items, from what a parser finds in the model's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline_services.gateway.field_types import Json
from paceline_services.gateway.responses.output_items import MESSAGE_TEXT, OutputItem


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
                yield from self._switch_to("msg", "message", MESSAGE_TEXT, role="assistant")
                yield self._delta(text, log_probs)
            case Reasoning(text) if text:
                yield from self._switch_to("rs", "reasoning", "reasoning_text", summary=[])
                yield self._delta(text)
            case ToolCall(index, name):
                yield from self._begin("fc", "function_call", call_id=self._call_id(index), name=name)
            case ToolArguments(_, text) if text and self._open is not None and not self._open.part:
                yield self._delta(text)

    def close(self, status: str, log_probs: Sequence[Json] = ()) -> Iterator[Json]:
        """End the last item. `status`: completed or incomplete. `log_probs`: of tokens without a text."""
        item, self._open = self._open, None
        if item is not None:
            item.log_probs += log_probs
            yield from item.done(status)

    def _switch_to(self, prefix: str, kind: str, part: str, **fields: Any) -> Iterator[Json]:
        """Begin an item with this part, unless the last one has it and is open."""
        if self._open is None or self._open.part != part:
            yield from self._begin(prefix, kind, part, **fields)

    def _begin(self, prefix: str, kind: str, part: str = "", **fields: Any) -> Iterator[Json]:
        yield from self.close("completed")
        index = len(self._items)
        self._open = OutputItem(f"{prefix}_{self._request_id}_{index}", index, kind, fields, part)
        self._items.append(self._open)
        yield from self._open.added()

    def _delta(self, text: str, log_probs: Sequence[Json] = ()) -> Json:
        assert self._open is not None
        return self._open.delta(text, log_probs)
