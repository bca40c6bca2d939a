"""One run of Locust: all that it is told, and passed on as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.figures import Goal
from loadtests.questions import Questions, RecordedQuestions, TimedQuestions
from loadtests.shapes import SHAPES, Row, rows


@dataclass(frozen=True, slots=True)
class Run:
    """`url`, `grpc`: the gateway, the latter as host:port. `users`: at most. `recorded`: questions that were answered
    before, by kind; a timed model needs none. `stalled_s`: a stream on which nothing came for so long hangs."""

    url: str
    grpc: str
    model: str
    speculative: bool
    shape: str
    ramp_s: float
    seconds: float
    users: int
    answers: tuple[int, int]
    goal: Goal
    recorded: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    stalled_s: float = 30.0

    @property
    def stages(self) -> list[Row]:
        return list(rows(SHAPES[self.shape], self.ramp_s, self.seconds, self.users))

    def questions(self) -> Questions:
        if self.recorded:
            return RecordedQuestions.of(self.recorded)
        return TimedQuestions(self.model, self.answers)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Run:
        told = json.loads(path.read_text())
        told["answers"], told["goal"] = tuple(told["answers"]), Goal(**told["goal"])
        return cls(**told)
