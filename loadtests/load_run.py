"""One run of Locust: all that it is told, and passed on as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.load_figures import LatencyGoal
from loadtests.load_requests import Questions, RecordedQuestions, TimedQuestions
from loadtests.load_shapes import SHAPES, UserStage, rows


@dataclass(frozen=True, slots=True)
class LoadRun:
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
    answer_tokens: tuple[int, int]
    goal: LatencyGoal
    recorded: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    stalled_s: float = 30.0

    @property
    def stages(self) -> list[UserStage]:
        return list(rows(SHAPES[self.shape], self.ramp_s, self.seconds, self.users))

    def questions(self) -> Questions:
        if self.recorded:
            return RecordedQuestions.of(self.recorded)
        return TimedQuestions(self.model, self.answer_tokens)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> LoadRun:
        told = json.loads(path.read_text())
        told["answer_tokens"], told["goal"] = tuple(told["answer_tokens"]), LatencyGoal(**told["goal"])
        return cls(**told)
