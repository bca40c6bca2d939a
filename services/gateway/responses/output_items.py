"""The items of a response's output while it is generated, and the stream's events about them.

A text item has one part. Its events, in this order: output_item.added, content_part.added, deltas, done,
content_part.done, output_item.done. A function call has no part. The names are OpenAI's; for reasoning that is not
summarised both OpenAI and vLLM have `reasoning_text`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

Json = dict[str, Any]


class OutputItem(ABC):
    """One item. Events have no `sequence_number` yet."""

    def __init__(self, item_id: str, index: int) -> None:
        """`index`: of the item in the response's output."""
        self._id = item_id
        self._index = index
        self._status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The item's text, or a function's arguments, so far."""
        return "".join(self._texts)

    @property
    @abstractmethod
    def as_json(self) -> Json:
        """The item so far."""

    def added(self) -> Iterator[Json]:
        """The events with which the item begins."""
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self.as_json}

    @abstractmethod
    def delta(self, text: str, log_probs: Sequence[Json]) -> Json:
        """Append some text; returns the event. `log_probs`: of the text's tokens, for messages only."""

    def done(self, status: str) -> Iterator[Json]:
        """The events with which the item ends. `status`: completed, or incomplete."""
        self._status = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.as_json}


class _TextItem(OutputItem):
    events: ClassVar[str]
    """Prefix of the types of its own events."""

    @abstractmethod
    def _part(self) -> Json:
        """The item's one part so far."""

    def added(self) -> Iterator[Json]:
        yield from super().added()
        yield self._event("response.content_part.added", part=self._part())

    def delta(self, text: str, log_probs: Sequence[Json]) -> Json:
        self._texts.append(text)
        return self._event(f"{self.events}.delta", delta=text)

    def done(self, status: str) -> Iterator[Json]:
        yield self._event(f"{self.events}.done", text=self.text)
        yield self._event("response.content_part.done", part=self._part())
        yield from super().done(status)

    def _content(self) -> list[Json]:
        return [self._part()] if self._texts else []

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0, **fields}


class OutputMessage(_TextItem):
    """The answer."""

    events = "response.output_text"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self.log_probs: list[Json] = []
        """Of its tokens, in the shape of chat completions; empty unless the client asks for them."""

    @property
    def as_json(self) -> Json:
        message = {"id": self._id, "type": "message", "role": "assistant", "status": self._status}
        return message | {"content": self._content()}

    def delta(self, text: str, log_probs: Sequence[Json]) -> Json:
        self.log_probs += log_probs
        return super().delta(text, log_probs) | {"logprobs": list(log_probs)}

    def done(self, status: str) -> Iterator[Json]:
        text_done, *others = super().done(status)
        yield text_done | {"logprobs": self.log_probs}
        yield from others

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.log_probs)}


class OutputReasoning(_TextItem):
    """What the model thinks before it answers."""

    events = "response.reasoning_text"

    @property
    def as_json(self) -> Json:
        item = {"id": self._id, "type": "reasoning", "status": self._status, "summary": []}
        return item | {"content": self._content()}

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class OutputFunctionCall(OutputItem):
    """A call of one of the request's functions. Its text is the arguments."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, index)
        self._call = {"call_id": call_id, "name": name}

    @property
    def as_json(self) -> Json:
        return {"id": self._id, "type": "function_call", "status": self._status, **self._call, "arguments": self.text}

    def delta(self, text: str, log_probs: Sequence[Json]) -> Json:
        self._texts.append(text)
        return self._event("delta", delta=text)

    def done(self, status: str) -> Iterator[Json]:
        yield self._event("done", arguments=self.text)
        yield from super().done(status)

    def _event(self, kind: str, **fields: Any) -> Json:
        kind = f"response.function_call_arguments.{kind}"
        return {"type": kind, "item_id": self._id, "output_index": self._index, **fields}
