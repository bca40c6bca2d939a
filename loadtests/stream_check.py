"""One stream as it came, and whether it is what had to come.

A chunk is not a token: speculation commits several at once. A stream brings its tokens' ids, and at its end the
server's own count of them (`usage`); both are held against what had to come. While a stream runs its events are only
kept; they are read when it is over, so that reading one does not delay the clock of another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from loadtests.load_requests import Question

DONE = b"[DONE]"


class StreamRecord(NamedTuple):
    """What is known of a stream afterwards. Times in seconds since the epoch.

    `lost`: tokens that had to come and did not. `changed`: tokens that are others than had to come. `fault`: what else
    is wrong, empty if nothing. `left`: by a client that meant to go.
    """

    kind: str
    began: float
    first: float
    ended: float
    tokens: int = 0
    chunks: int = 0
    longest_gap_s: float = 0.0
    first_tokens: int = 0
    """Those of the first chunk: nobody waited between them."""
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    lost: int = 0
    changed: int = 0
    fault: str = ""
    left: bool = False


@dataclass(slots=True)
class ReceivedStream:
    """What a stream said. `counted`, `prompt_tokens`: by the server's usage; None until it said so."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    finish_reason: str | None = None
    counted: int | None = None
    prompt_tokens: int | None = None
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    complete: bool = False
    error: str = ""

    def add_tokens(self, when: float, tokens: list[int]) -> None:
        if tokens:
            self.tokens += tokens
            self.arrivals.append((when, len(tokens)))

    def add_chunk(self, when: float, chunk: Mapping[str, Any]) -> None:
        """A chunk of the HTTP API."""
        if "error" in chunk:
            self.error = str(chunk["error"]["message"])
            return
        for choice in chunk["choices"]:
            self.add_tokens(when, choice.get("token_ids") or [])
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := chunk.get("usage"):
            self.counted, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        if stats := chunk.get("speculation"):
            self.verifications, self.drafted = stats["verifications"], stats["drafted_tokens"]
            self.accepted = sum(stats["accepted_by_depth"])


def parse_events(events: list[tuple[float, bytes]]) -> ReceivedStream:
    """What server-sent events said, each of which came at its time."""
    heard = ReceivedStream()
    for when, event in events:
        data = event.strip().removeprefix(b"data: ")
        if data == DONE:
            heard.complete = True
        elif data:
            heard.add_chunk(when, json.loads(data))
    return heard


def check_unfinished(began: float, heard: ReceivedStream, stalled_s: float) -> ReceivedStream:
    """A stream at the end of the run, which it did not reach: excused unless nothing came for `stalled_s`."""
    latest = heard.arrivals[-1][0] if heard.arrivals else began
    silent_s = time.time() - latest
    return replace(heard, error=heard.error or f"nothing came for {silent_s:.0f} s") if silent_s > stalled_s else heard


def check_stream(
    kind: str, began: float, question: Question, heard: ReceivedStream, *, left: bool = False
) -> StreamRecord:
    """Hold a stream against what had to come. A client that `left` is owed only what it had been sent."""
    expected = question.expected[: len(heard.tokens)] if left else question.expected
    pairs = zip(heard.tokens, expected, strict=False)
    times = [when for when, _ in heard.arrivals]
    return StreamRecord(
        kind,
        began,
        first=times[0] if times else 0.0,
        ended=times[-1] if times else time.time(),
        tokens=len(heard.tokens),
        chunks=len(times),
        longest_gap_s=max((b - a for a, b in pairwise(times)), default=0.0),
        first_tokens=heard.arrivals[0][1] if times else 0,
        verifications=heard.verifications,
        drafted=heard.drafted,
        accepted=heard.accepted,
        lost=max(0, len(expected) - len(heard.tokens)),
        changed=sum(a != b for a, b in pairs) + max(0, len(heard.tokens) - len(question.expected)),
        fault=heard.error or ("" if left else _fault(question, heard)),
        left=left,
    )


def _fault(question: Question, heard: ReceivedStream) -> str:
    if not heard.complete:
        return "the stream broke off"
    if heard.finish_reason is None:
        return "no finish reason"
    if heard.counted != len(heard.tokens):
        return f"usage says {heard.counted} tokens, {len(heard.tokens)} came"
    if heard.prompt_tokens != question.prompt_tokens:
        return f"usage says {heard.prompt_tokens} prompt tokens, {question.prompt_tokens} were sent"
    return ""
