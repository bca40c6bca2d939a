"""What is asked, and which tokens must come.

A timed model's text is known without running it (`paceline_lab.fake_models.timed_text`), so every question to it is a
new one. Any
other model is asked a few questions before the load, plainly and one after the other; under load the same must come.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_text import greedy

SHORT = 24
LONG = 1000
"""Tokens of a prompt to a timed model."""


@dataclass(frozen=True, slots=True)
class Question:
    """`expected`: the tokens of the answer. `prompt_tokens`: those of the prompt, chat template included."""

    text: str
    chat: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    expected: Sequence[int] = ()
    prompt_tokens: int = 0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, speculative: bool) -> dict[str, Any]:
        """Of a streaming HTTP request."""
        prompt = {"messages": [{"role": "user", "content": self.text}]} if self.chat else {"prompt": self.text}
        wanted = {"return_token_ids": True, "speculation_stats": True, "stream_options": {"include_usage": True}}
        return {**prompt, **self.sampling, **wanted, "stream": True, "speculative": speculative}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Questions(Protocol):
    """Where users have them from."""

    def short(self, *, chat: bool) -> Question: ...

    def long(self) -> Question: ...


class TimedQuestions:
    """To a timed model: numbers at random, at temperature 0. `answers`: tokens of an answer, at least and at most."""

    def __init__(self, model: str, answers: tuple[int, int], chance: random.Random | None = None) -> None:
        self._spec = TimedModelConfig.parse(model)
        self._answers = answers
        self._chance = chance or random.Random()

    def short(self, *, chat: bool) -> Question:
        return self._question(self._chance.randint(SHORT // 2, SHORT), chat)

    def long(self) -> Question:
        return self._question(self._chance.randint(LONG // 2, LONG), False)

    def _question(self, length: int, chat: bool) -> Question:
        prompt = [self._chance.randrange(self._spec.vocabulary) for _ in range(length)]
        count = self._chance.randint(*self._answers)
        said = list(islice(greedy(self._spec, prompt), count))
        sampling = {"max_tokens": count, "temperature": 0}
        return Question(" ".join(map(str, prompt)), chat, sampling, said, length)


class RecordedQuestions:
    """Those that were answered before."""

    def __init__(self, chats: Sequence[Question], texts: Sequence[Question], longs: Sequence[Question]) -> None:
        self._chats, self._texts, self._longs = chats, texts, longs
        self._chance = random.Random()

    @classmethod
    def of(cls, recorded: Mapping[str, Sequence[Mapping[str, Any]]]) -> RecordedQuestions:
        """By kind, each as `Question.as_json` gives it."""
        return cls(*([Question(**each) for each in recorded[kind]] for kind in ("chats", "texts", "longs")))

    def short(self, *, chat: bool) -> Question:
        return self._chance.choice(self._chats if chat else self._texts)

    def long(self) -> Question:
        return self._chance.choice(self._longs)
