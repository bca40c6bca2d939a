"""The items of a response's output while it is generated, and the stream's events about them.

A text item has one part. Its events, in this order: output_item.added, content_part.added, deltas, done,
content_part.done, output_item.done. A function call has no part. The names are OpenAI's; for reasoning that is not
summarised both OpenAI and vLLM have `reasoning_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_services.gateway.field_types import Json

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
