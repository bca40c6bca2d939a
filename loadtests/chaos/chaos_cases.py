"""The clients' requests and the expected answers: those of the target alone, undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx

from loadtests.received_stream import ReceivedStream

ALTERNATING_LENGTH_REGEX = "[^ ]*(?: [^ ]* [^ ]?)*(?: [^ ]*)?"
"""Words between blanks, every second of at most one character. Any tokenizer can write such text without end, and a
grammar state that misses earlier output writes different text."""
LAST = 9
"""A token id of every vocabulary."""

SAMPLING_CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 12, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "frequency": {"temperature": 1.0, "seed": 13, "frequency_penalty": 0.6, "top_k": 12, "min_p": 0.01},
    "log-probs": {"temperature": 0.7, "seed": 2**63 + 1, "logprobs": 3},
    "grammar": {"temperature": 0.8, "seed": 14, "structured_outputs": {"regex": ALTERNATING_LENGTH_REGEX}},
}
NUMBERS = ("1 2 3", "7 11 13 7 11", "5 4 3 2 1")
SENTENCES = ("Return the number of", "def load(path):\n    ", "Parse a string of")
STREAM_OPTIONS = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """A request's body and the expected answer."""

    name: str
    body: dict[str, Any]
    expected: ReceivedStream


class UnexpectedAnswerError(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, response: httpx.Response, text: str) -> None:
        super().__init__(f"{response.status_code}: {text[:500]}")
        self.status = response.status_code
        self.retry_after_s = float(response.headers.get("retry-after", "0"))


def barred(max_tokens: int) -> dict[str, Any]:
    """Sampling under which `LAST` comes as soon as `min_tokens` allows it: a wrong count ends the answer elsewhere."""
    return {
        "temperature": 0.8,
        "seed": 15,
        "logit_bias": {str(LAST): 100, "5": 3, "11": -100},
        "bad_words": ["7", "1 2"],
        "stop_token_ids": [LAST],
        "min_tokens": max_tokens - 1,
    }


async def cases(
    http: httpx.AsyncClient, url: str, prompts: Sequence[str], max_tokens: int, more: Mapping[str, Any] | None = None
) -> list[ChaosCase]:
    """Every prompt with all sampling cases, and with stop strings that span tokens; each answered once, plainly.

    `more` is added to every body. Cases whose answers end before `max_tokens` come last. Raises what `ask` raises.
    """
    combinations = [
        *product(enumerate(prompts), SAMPLING_CASES.items()),
        *product(enumerate(prompts), [("barred", barred(max_tokens))]),
    ]
    bodies = {
        f"{name} {number}": {"prompt": prompt, "max_tokens": max_tokens, **STREAM_OPTIONS, **sampling, **(more or {})}
        for (number, prompt), (name, sampling) in combinations
    }
    plain = await asyncio.gather(*(_reference(http, url, name, body) for name, body in bodies.items()))
    stopped = [
        _reference(http, url, f"stop {case.name}", {**case.body, "stop": _inside(case.expected.text)})
        for case in plain
        if case.name.startswith(("greedy", "sampled")) and case.expected.text
    ]
    return [*plain, *await asyncio.gather(*stopped)]


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> ReceivedStream:
    """The whole answer. Raises `UnexpectedAnswerError`, `StreamError` or httpx's errors."""
    stream = ReceivedStream()
    async with opened(http, url, body) as lines:
        async for line in lines:
            stream.feed(line)
    stream.require_end()
    return stream


@asynccontextmanager
async def opened(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], last_id: str = ""
) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of the event stream; those after the event with `last_id`, if it is given.

    Raises `UnexpectedAnswerError` or httpx's errors.
    """
    headers = {"last-event-id": last_id} if last_id else {}
    async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        if not response.is_success:
            raise UnexpectedAnswerError(response, (await response.aread()).decode(errors="replace"))
        yield response.aiter_lines()


async def _reference(http: httpx.AsyncClient, url: str, name: str, body: dict[str, Any]) -> ChaosCase:
    return ChaosCase(name, body, await ask(http, url, {**body, "speculative": False}))


def _inside(text: str) -> str:
    """A piece of the text's last quarter, longer than most tokens."""
    at = len(text) * 3 // 4
    return text[at : at + 6]
