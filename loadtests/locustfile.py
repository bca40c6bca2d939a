"""What Locust runs: the users, as many as the shape sets, and at the end one line of JSON.

Started by `python -m loadtests`, which writes the file that `--run` names.
"""

from __future__ import annotations

import json
import pickle
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
from loadtests.load_profiles import LoadRun
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
"""Most distinct faults in the summary."""


class ShapeFromRun(LoadTestShape):
    """The run's shape; `run` is set before the first tick."""

    run: LoadRun

    def tick(self) -> tuple[int, float] | None:
        """Users and spawn rate, for Locust, which calls this every second; None ends the run."""
        users = users_at(self.get_run_time(), self.run.stages)
        return None if users is None else (users, max(1.0, self.run.profile.users / self.run.profile.ramp_s))


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="a pickled loadtests.load_profiles.LoadRun")


@events.init.add_listener
def prepare(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None  # it has a command line
    run: LoadRun = pickle.loads(environment.parsed_options.run.read_bytes())
    environment.host = run.url
    ShapeFromRun.run = run
    RecordingUser.load_run = run
    GrpcUser.connect(run.grpc)
    records: list[StreamRecord] = []
    crashed: list[str] = []
    began: list[float] = []

    def keep(context: dict[str, Any], **_: object) -> None:
        records.append(context["answer"])

    def crash(exception: BaseException, **_: object) -> None:
        crashed.append(f"a user stopped: {exception!r}")

    def begin(**_: object) -> None:
        began.append(time.time())

    def sum_up(**_: object) -> None:
        sys.stdout.write(json.dumps(summary(run, records, crashed, began[0])) + "\n")

    environment.events.request.add_listener(keep)
    environment.events.user_error.add_listener(crash)
    environment.events.test_start.add_listener(begin)
    environment.events.quit.add_listener(sum_up)


def summary(run: LoadRun, records: list[StreamRecord], crashed: list[str], began: float) -> dict[str, Any]:
    """Figures of the whole load and of each of its stages. Faults count from the first user on."""
    stages = run.stages
    whole = began + stages[0].begins, began + stages[-1].ends
    faults = crashed + [f"{record.kind}: {record.fault}" for record in records if record.fault]
    by_stage = [
        {"users": row.users, **asdict(figures(records, began + row.begins, began + row.ends, run.profile.goal))}
        for row in stages
    ]
    return {
        "window": whole,
        "errors": len(faults),
        "lost_tokens": sum(record.lost for record in records),
        "changed_tokens": sum(record.changed for record in records),
        "faults": list(dict.fromkeys(faults))[:FAULTS_SHOWN],
        "figures": asdict(figures(records, *whole, run.profile.goal)),
        "stages": by_stage if len(by_stage) > 1 else [],
    }
