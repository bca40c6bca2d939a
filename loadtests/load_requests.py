"""The requests of the load, and the tokens that must come.

A timed model's text is known without running it (`paceline_lab.fake_models.timed_text`), so every request to it is a
new one. Any other model answers a few requests before the load, plainly and one at a time; under load the same tokens
must come.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from paceline.cli.http_client import HttpClient
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_text import greedy

SHORT = 24
LONG = 1000
"""Tokens of a prompt to a timed model."""

NAMES = ("json.dumps", "os.path.join", "itertools.chain", "re.sub", "asyncio.gather")
TEXTS = ("def area(radius):\n", "import os\n\n\ndef ", "class Stack:\n", "for line in ", "    return ")
FILLER = "def scale(values, factor):\n    return [value * factor for value in values]\n\n\n" * 12
"""About 300 tokens of the shipped model, in front of a long prompt."""
MAX_TOKENS = 48
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Question:
    """`expected`: the tokens of the answer. `prompt_tokens`: tokens of the prompt, chat template included."""

    text: str
    chat: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    expected: Sequence[int] = ()
    prompt_tokens: int = 0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, speculative: bool) -> dict[str, Any]:
        """The body of a streaming HTTP request."""
        prompt = {"messages": [{"role": "user", "content": self.text}]} if self.chat else {"prompt": self.text}
        options = {"return_token_ids": True, "speculation_stats": True, "stream_options": {"include_usage": True}}
        return {**prompt, **self.sampling, **options, "stream": True, "speculative": speculative}


class Questions(Protocol):
    """The source of the users' requests."""

    def short(self, *, chat: bool) -> Question: ...

    def long(self) -> Question: ...


class TimedQuestions:
    """Random numbers for a timed model, at temperature 0. `answer_tokens`: fewest and most tokens of an answer."""

    def __init__(self, model: str, answer_tokens: tuple[int, int], chance: random.Random | None = None) -> None:
        self._spec = TimedModelConfig.parse(model)
        self._answer_tokens = answer_tokens
        self._chance = chance or random.Random()

    def short(self, *, chat: bool) -> Question:
        return self._question(self._chance.randint(SHORT // 2, SHORT), chat)

    def long(self) -> Question:
        return self._question(self._chance.randint(LONG // 2, LONG), False)

    def _question(self, length: int, chat: bool) -> Question:
        prompt = [self._chance.randrange(self._spec.vocabulary) for _ in range(length)]
        count = self._chance.randint(*self._answer_tokens)
        expected = list(islice(greedy(self._spec, prompt), count))
        sampling = {"max_tokens": count, "temperature": 0}
        return Question(" ".join(map(str, prompt)), chat, sampling, expected, length)


@dataclass(slots=True)
class RecordedQuestions:
    """Requests that were answered before the load."""

    chats: Sequence[Question]
    texts: Sequence[Question]
    longs: Sequence[Question]
    _chance: random.Random = field(default_factory=random.Random)

    def short(self, *, chat: bool) -> Question:
        return self._chance.choice(self.chats if chat else self.texts)

    def long(self) -> Question:
        return self._chance.choice(self.longs)


async def record_questions(client: HttpClient) -> RecordedQuestions:
    """Decode every request plainly, one at a time, and keep the answers."""

    async def recorded(texts: Sequence[str], *, chat: bool = False) -> list[Question]:
        return [await _answered(client, question) for question in _sampled(texts, chat)]

    return RecordedQuestions(
        chats=await recorded([f"What does {name} do?" for name in NAMES], chat=True),
        texts=await recorded(TEXTS),
        longs=await recorded([FILLER + text for text in TEXTS[:2]]),
    )


def _sampled(texts: Sequence[str], chat: bool) -> Iterator[Question]:
    for seed, text in enumerate(texts):
        for temperature in TEMPERATURES:
            yield Question(text, chat, {"max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed})


async def _answered(client: HttpClient, question: Question) -> Question:
    answer = await client.collect(question.path, question.body(speculative=False))
    return replace(question, expected=answer.tokens, prompt_tokens=answer.prompt_tokens)
