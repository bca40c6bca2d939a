"""What a streaming client received."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class StreamError(Exception):
    """The stream brought an error, or something that is no event."""


@dataclass(slots=True)
class StreamResponse:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    """The stream came to its end."""

    def take(self, line: str) -> None:
        """Add one line of the event stream. Raises `StreamError`."""
        if not line:
            return
        if line == "data: [DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(line.removeprefix("data: "))
        except ValueError:
            raise StreamError(f"no event: {line[:200]!r}") from None
        if "error" in chunk:
            raise StreamError(str(chunk["error"]["message"]))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.tokens += choice.get("token_ids") or []
            if told := choice.get("logprobs"):
                self.log_probs += zip(told["token_logprobs"], told["top_logprobs"], strict=True)
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def equals(self, expected: StreamResponse) -> bool:
        """Token by token, character by character, and to the last bit of every log-probability."""
        return (
            self.tokens == expected.tokens
            and self.text == expected.text
            and self.log_probs == expected.log_probs
            and self.finish_reason == expected.finish_reason
            and self.usage.get("completion_tokens") == expected.usage.get("completion_tokens")
        )

    def is_prefix_of(self, expected: StreamResponse) -> bool:
        """What came is how `expected` begins."""
        return (
            self.tokens == expected.tokens[: len(self.tokens)]
            and expected.text.startswith(self.text)
            and self.log_probs == expected.log_probs[: len(self.log_probs)]
        )
