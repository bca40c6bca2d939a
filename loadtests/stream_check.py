"""Checks one received stream against the tokens that had to come.

A chunk is not a token: speculation commits several at once. A stream carries its tokens' ids and ends with the
server's own count of them (`usage`); both are checked. While a stream runs its events are only kept; they are parsed
when it is over, so that parsing one stream does not delay the clock of another.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from loadtests.load_requests import Question
from loadtests.received_stream import ReceivedStream


class StreamRecord(NamedTuple):
    """The outcome of one request. Times in seconds since the epoch."""

    kind: str
    began: float
    first: float
    ended: float
    tokens: int = 0
    chunks: int = 0
    longest_gap_s: float = 0.0
    first_tokens: int = 0
    """Tokens of the first chunk: a client does not wait between them."""
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    lost: int = 0
    """Expected tokens that did not come."""
    changed: int = 0
    """Tokens that differ from the expected ones."""
    fault: str = ""
    """Any other fault; empty if there is none."""
    left: bool = False
    """The client closed the connection on purpose."""


def check_unfinished(began: float, stream: ReceivedStream, stalled_s: float) -> ReceivedStream:
    """A stream cut off by the end of the run, with an error if nothing came for the last `stalled_s` seconds."""
    latest = stream.arrivals[-1][0] if stream.arrivals else began
    silent_s = time.time() - latest
    if silent_s <= stalled_s:
        return stream
    return replace(stream, error=stream.error or f"nothing came for {silent_s:.0f} s")


def check_stream(
    kind: str, began: float, question: Question, stream: ReceivedStream, *, left: bool = False
) -> StreamRecord:
    """Compare a stream with the expected tokens. If the client `left`, only tokens received by then count."""
    expected = question.expected[: len(stream.tokens)] if left else question.expected
    pairs = zip(stream.tokens, expected, strict=False)
    times = [when for when, _ in stream.arrivals]
    return StreamRecord(
        kind,
        began,
        first=times[0] if times else 0.0,
        ended=times[-1] if times else time.time(),
        tokens=len(stream.tokens),
        chunks=len(times),
        longest_gap_s=max((b - a for a, b in pairwise(times)), default=0.0),
        first_tokens=stream.arrivals[0][1] if times else 0,
        verifications=stream.speculation.get("verifications", 0),
        drafted=stream.speculation.get("drafted_tokens", 0),
        accepted=sum(stream.speculation.get("accepted_by_depth", ())),
        lost=max(0, len(expected) - len(stream.tokens)),
        changed=sum(a != b for a, b in pairs) + max(0, len(stream.tokens) - len(question.expected)),
        fault=stream.error or ("" if left else _fault(question, stream)),
        left=left,
    )


def _fault(question: Question, stream: ReceivedStream) -> str:
    if not stream.complete:
        return "the stream broke off"
    if stream.finish_reason is None:
        return "no finish reason"
    completion_tokens, prompt_tokens = (stream.usage.get(f"{part}_tokens") for part in ("completion", "prompt"))
    if completion_tokens != len(stream.tokens):
        return f"usage counts {completion_tokens} tokens, {len(stream.tokens)} came"
    if prompt_tokens != question.prompt_tokens:
        return f"usage counts {prompt_tokens} prompt tokens, {question.prompt_tokens} were sent"
    return ""
