"""A response's output: items, from what a parser finds in the model's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline_services.gateway.http.json_body import Json

MESSAGE_TEXT = "output_text"
"""The only part with log-probabilities."""


@dataclass(slots=True)
class OutputItem:
    """One item. Its events have no `sequence_number` yet."""

    id: str
    index: int
    """In the response's output."""
    type: str
    fields: Json
    """The fields that only items of this type have, but for the text."""
    part: str = ""
    """The type of a text item's part. Empty: a function call, whose text is the arguments."""
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    log_probs: list[Json] = field(default_factory=list)
    """Of a message's tokens, in the shape of chat completions; empty unless the client asks for them."""

    @property
    def as_json(self) -> Json:
        """The item so far."""
        text: Json = {"content": [self._part()] if self.texts else []} if self.part else {"arguments": self._text}
        return {"id": self.id, "type": self.type, "status": self.status, **self.fields, **text}

    def added(self) -> Iterator[Json]:
        """The events with which the item begins."""
        yield self._item_event("added")
        if self.part:
            yield self._text_event("content_part.added", part=self._part())

    def delta(self, text: str, log_probs: Sequence[Json]) -> Json:
        """Append some text; returns the event. `log_probs`: of the text's tokens."""
        self.texts.append(text)
        self.log_probs += log_probs
        return self._text_event(f"{self._text_name}.delta", delta=text, **self._shown(log_probs))

    def done(self, status: str) -> Iterator[Json]:
        """The events with which the item ends. `status`: completed, or incomplete."""
        self.status = status
        text = {"text" if self.part else "arguments": self._text}
        yield self._text_event(f"{self._text_name}.done", **text, **self._shown(self.log_probs))
        if self.part:
            yield self._text_event("content_part.done", part=self._part())
        yield self._item_event("done")

    @property
    def _text(self) -> str:
        return "".join(self.texts)

    @property
    def _text_name(self) -> str:
        """What events call the text."""
        return self.part or "function_call_arguments"

    def _part(self) -> Json:
        annotations: Json = {"annotations": []} if self.part == MESSAGE_TEXT else {}
        return {"type": self.part, "text": self._text, **annotations, **self._shown(self.log_probs)}

    def _shown(self, log_probs: Sequence[Json]) -> Json:
        return {"logprobs": [*log_probs]} if self.part == MESSAGE_TEXT else {}

    def _item_event(self, kind: str) -> Json:
        return {"type": f"response.output_item.{kind}", "output_index": self.index, "item": self.as_json}

    def _text_event(self, kind: str, **fields: Any) -> Json:
        part: Json = {"content_index": 0} if self.part else {}
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **part, **fields}


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
