"""Streaming chats under a growing load.

A chunk is not a token: speculation commits several at once. Tokens are counted from the `usage` that
ends each stream, and reported as the size of the `answer` row, which Locust adds up over all workers.
The last line of output is one JSON document.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from locust import HttpUser, LoadTestShape, between, events, task
from locust.env import Environment
from locust.runners import WorkerRunner
from requests import Response


class Stage(NamedTuple):
    seconds: int
    users: int
    spawn_rate: float  # users per second


PROFILE = [
    Stage(seconds=15, users=1, spawn_rate=1),
    Stage(seconds=30, users=4, spawn_rate=1),
    Stage(seconds=30, users=16, spawn_rate=4),
    Stage(seconds=15, users=1, spawn_rate=4),
]

QUESTIONS = [
    "What does json.dumps do?",
    "What does os.path.join do?",
    "What does itertools.chain do?",
    "What does re.sub do?",
    "What does asyncio.gather do?",
]


class Profile(LoadTestShape):
    def tick(self) -> tuple[int, float] | None:
        """Return what Locust should run now; None ends the test."""
        elapsed = self.get_run_time()
        for stage in PROFILE:
            elapsed -= stage.seconds
            if elapsed < 0:
                return stage.users, stage.spawn_rate
        return None


class Chatter(HttpUser):
    wait_time = between(0.5, 1.5)

    def on_start(self) -> None:
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def chat(self) -> None:
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": random.choice(QUESTIONS)}],
            "max_tokens": 128,
            "temperature": random.choice([0.0, 0.8]),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        first_token = tokens = None
        with self.client.post(
            "/v1/chat/completions", json=request, stream=True, catch_response=True, name="headers"
        ) as response:
            if not response.ok:
                return
            for event in stream(response):
                if first_token is None and event.get("choices"):
                    first_token = time.perf_counter()
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
        if first_token is None or tokens is None:
            self.report("answer", started, time.perf_counter(), error=ValueError("no token, or no usage"))
        else:
            self.report("first token", started, first_token)
            self.report("answer", started, time.perf_counter(), tokens)

    def report(self, row: str, started: float, ended: float, size: int = 0, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type="CHAT",
            name=row,
            response_time=(ended - started) * 1000,
            response_length=size,
            exception=error,
            context={},
        )


def stream(response: Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a server-sent event stream, up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


@events.init.add_listener
def sum_up_last(environment: Environment, **_: object) -> None:
    def sum_up(**_: object) -> None:
        answers = environment.stats.get("answer", "CHAT")
        seconds = (answers.last_request_timestamp or answers.start_time) - answers.start_time
        summary = {
            "answers": answers.num_requests - answers.num_failures,
            "failures": environment.stats.total.num_failures,
            "tokens": answers.total_content_length,
            "tokens_per_s": round(answers.total_content_length / seconds, 1) if seconds else 0.0,
        }
        sys.stdout.write(json.dumps(summary) + "\n")

    if not isinstance(environment.runner, WorkerRunner):  # its numbers are the master's to tell
        environment.events.quit.add_listener(sum_up)
