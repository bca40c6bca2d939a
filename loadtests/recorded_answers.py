"""What a model says plainly and undisturbed: asked before the load, compared with under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from loadtests.load_requests import Question
from paceline.cli.http_client import HttpClient

NAMES = ("json.dumps", "os.path.join", "itertools.chain", "re.sub", "asyncio.gather")
TEXTS = ("def area(radius):\n", "import os\n\n\ndef ", "class Stack:\n", "for line in ", "    return ")
FILLER = "def scale(values, factor):\n    return [value * factor for value in values]\n\n\n"
LONG = 12
"""Repetitions of the filler in a long prompt: some 300 tokens of the shipped model."""
MAX_TOKENS = 48
TEMPERATURES = (0.0, 0.8)


async def recorded(client: HttpClient) -> dict[str, Sequence[dict[str, Any]]]:
    """Questions with their answers, by kind: short chats, short texts, and long ones."""
    kinds = {
        "chats": [(f"What does {name} do?", True) for name in NAMES],
        "texts": [(text, False) for text in TEXTS],
        "longs": [(FILLER * LONG + text, False) for text in TEXTS[:2]],
    }
    return {
        kind: [(await _answered(client, question)).as_json() for question in _sampled(asked)]
        for kind, asked in kinds.items()
    }


def _sampled(asked: Sequence[tuple[str, bool]]) -> Iterator[Question]:
    for seed, (text, chat) in enumerate(asked):
        for temperature in TEMPERATURES:
            yield Question(text, chat, {"max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed})


async def _answered(client: HttpClient, question: Question) -> Question:
    answer = await client.collect(question.path, question.body(speculative=False))
    return replace(question, expected=answer.tokens, prompt_tokens=answer.prompt_tokens)
