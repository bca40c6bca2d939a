"""What Locust runs: the users, as many as the shape says, and at the end one line of JSON.

Not to be called by hand: `python -m loadtests` writes the file that `--run` names.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locust import LoadTestShape, events
from locust.env import Environment

from loadtests.grpc_users import GrpcUser
from loadtests.http_users import (
    ChatUser,
    CompletionUser,
    DisconnectingUser,
    LongCompletionUser,
    MalformedRequestUser,
    RecordingUser,
)
from loadtests.load_figures import figures
from loadtests.load_run import LoadRun
from loadtests.load_shapes import users_at
from loadtests.stream_check import StreamRecord

__all__ = [
    "ChatUser",
    "CompletionUser",
    "DisconnectingUser",
    "GrpcUser",
    "LongCompletionUser",
    "MalformedRequestUser",
    "ShapeFromRun",
]

FAULTS_SHOWN = 10
"""So many different ones."""


class ShapeFromRun(LoadTestShape):
    """The run's shape; `run` is set before the first tick."""

    run: LoadRun

    def tick(self) -> tuple[int, float] | None:
        """Called by Locust every second."""
        users = users_at(self.get_run_time(), self.run.stages)
        return None if users is None else (users, max(1.0, self.run.users / self.run.ramp_s))


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="a file as loadtests.load_run.LoadRun writes it")


@events.init.add_listener
def prepare(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None  # it has a command line
    run = LoadRun.read(environment.parsed_options.run)
    environment.host = run.url
    ShapeFromRun.run = run
    RecordingUser.questions, RecordingUser.speculative, RecordingUser.stalled_s = (
        run.questions(),
        run.speculative,
        run.stalled_s,
    )
    GrpcUser.connect(run.grpc)
    answers: list[StreamRecord] = []
    crashed: list[str] = []
    began: list[float] = []

    def keep(context: dict[str, Any], **_: object) -> None:
        answers.append(context["answer"])

    def crash(exception: BaseException, **_: object) -> None:
        crashed.append(f"a user stopped: {exception!r}")

    def begin(**_: object) -> None:
        began.append(time.time())

    def sum_up(**_: object) -> None:
        sys.stdout.write(json.dumps(summary(run, answers, crashed, began[0])) + "\n")

    environment.events.request.add_listener(keep)
    environment.events.user_error.add_listener(crash)
    environment.events.test_start.add_listener(begin)
    environment.events.quit.add_listener(sum_up)


def summary(run: LoadRun, answers: list[StreamRecord], crashed: list[str], began: float) -> dict[str, Any]:
    """Figures of the whole load and of each of its stages; what went wrong counts from the first user on."""
    stages = run.stages
    whole = began + stages[0].begins, began + stages[-1].ends
    faults = crashed + [f"{each.kind}: {each.fault}" for each in answers if each.fault]
    by_stage = [
        {"users": row.users, **asdict(figures(answers, began + row.begins, began + row.ends, run.goal))}
        for row in stages
    ]
    return {
        "window": whole,
        "errors": len(faults),
        "lost_tokens": sum(each.lost for each in answers),
        "changed_tokens": sum(each.changed for each in answers),
        "faults": list(dict.fromkeys(faults))[:FAULTS_SHOWN],
        "figures": asdict(figures(answers, *whole, run.goal)),
        "stages": by_stage if len(by_stage) > 1 else [],
    }
