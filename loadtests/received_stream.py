"""A streamed answer as a client received it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.http_client import HttpCompletion

UNAVAILABLE = "service_unavailable"
"""The type of errors that go away."""


class StreamError(Exception):
    """The stream carried an error, or a line that is no event."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        """`temporary`: the stream can be resumed."""
        super().__init__(message)
        self.temporary = temporary


@dataclass
class ReceivedStream(HttpCompletion):
    """A completion with its arrival times, log-probabilities, usage and end."""

    log_probs: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """By token: its own log-probability, and those of the most probable tokens (completions only)."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each chunk that carried tokens."""
    last_id: str = ""
    """The id of the latest event; "": it has none, so that the stream cannot be resumed."""
    _next_id: str = ""
    """The id of the event whose data comes next."""
    complete: bool = False
    error: str = ""

    def feed(self, line: str, when: float = 0.0) -> None:
        """Add one line of the event stream, received at `when`. Raises `StreamError`."""
        if not line or line.startswith(":"):  # a comment, as gateways send to keep a quiet stream open
            return
        if line.startswith("id:"):
            self._next_id = line.removeprefix("id:").strip()
            return
        if line == "data: [DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(line.removeprefix("data: "))
        except ValueError:
            raise StreamError(f"no event: {line[:200]!r}") from None
        if "error" in chunk:
            error = chunk["error"]
            raise StreamError(str(error["message"]), temporary=error.get("type") == UNAVAILABLE)
        self.add_chunk(chunk, when)
        self.last_id = self._next_id

    def add_chunk(self, chunk: Mapping[str, Any], when: float = 0.0) -> None:
        """Add one chunk of the HTTP API, received at `when`."""
        before = len(self.tokens)
        self.take(chunk)
        if len(self.tokens) > before:
            self.arrivals.append((when, len(self.tokens) - before))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if listed := choice.get("logprobs"):
                self.log_probs += zip(listed["token_logprobs"], listed["top_logprobs"], strict=True)

    def require_end(self) -> None:
        """Raises `StreamError` unless the stream ended with its end mark."""
        if not self.complete:
            raise StreamError("the stream ended without its end mark")


def parse_events(events: Iterable[tuple[float, bytes]]) -> ReceivedStream:
    """The stream of these server-sent events and their arrival times. A `StreamError` becomes the stream's `error`."""
    stream = ReceivedStream()
    try:
        for when, event in events:
            for line in event.decode(errors="replace").splitlines():
                stream.feed(line, when)
    except StreamError as error:
        stream.error = str(error)
    return stream


def same_answer(one: ReceivedStream, other: ReceivedStream) -> bool:
    """Whether two answers are equal: tokens, text, every bit of the log-probabilities, finish reason, and usage."""
    return (
        one.tokens == other.tokens
        and one.text == other.text
        and one.log_probs == other.log_probs
        and one.finish_reason == other.finish_reason
        and one.usage.get("completion_tokens") == other.usage.get("completion_tokens")
    )


def is_prefix(received: ReceivedStream, expected: ReceivedStream) -> bool:
    """Whether what was received is the beginning of the expected answer."""
    return (
        received.tokens == expected.tokens[: len(received.tokens)]
        and expected.text.startswith(received.text)
        and received.log_probs == expected.log_probs[: len(received.log_probs)]
    )
