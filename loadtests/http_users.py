"""The HTTP users. Importing this module patches Python's sockets with gevent's, as Locust does."""

from __future__ import annotations

import json
import random
import time
from http.client import HTTPException
from typing import Any, ClassVar

from gevent import GreenletExit
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketResponse
from locust import User, constant, task

from loadtests.load_figures import REFUSED
from loadtests.load_profiles import LoadRun
from loadtests.load_requests import Question
from loadtests.received_stream import ReceivedStream, parse_events
from loadtests.stream_check import StreamRecord, check_stream, check_unfinished

TIMEOUT_S = 120.0
BROKEN = (OSError, HTTPException, ValueError, LookupError, TypeError)
"""A connection that ends too early, or carries no valid answer."""
JSON_HEADERS = {"Content-Type": "application/json"}
EVENT_END = b"\n\n"
MAX_CHUNKS_BEFORE_LEAVING = 12
"""Most events that `DisconnectingUser` receives."""


class RecordingUser(User):
    """Reports every request to Locust. `load_run` is set before the first user starts."""

    abstract = True
    kind: ClassVar[str]
    load_run: ClassVar[LoadRun]

    def report(self, answer: StreamRecord) -> None:
        """Fire Locust's request event. Its context holds the record."""
        wrong = f"{answer.lost} tokens lost, {answer.changed} changed" if answer.lost or answer.changed else ""
        failure = answer.fault or wrong
        self.environment.events.request.fire(
            request_type=type(self).__name__,
            name=answer.kind,
            response_time=1e3 * (answer.ended - answer.began),
            response_length=answer.tokens,
            exception=RuntimeError(failure) if failure else None,
            context={"answer": answer},
        )


class HttpUser(RecordingUser):
    """One connection, with one request after another."""

    abstract = True

    def on_start(self) -> None:
        self.http = HTTPClient.from_url(
            self.host or "", concurrency=1, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )

    def on_stop(self) -> None:
        self.http.close()

    def ask(self, question: Question, leave_after: int | None = None) -> None:
        """Stream an answer. After `leave_after` events, if given, the connection is closed."""
        began = time.time()
        events: list[tuple[float, bytes]] = []
        try:
            response = self.post(question.path, question.body(speculative=self.load_run.speculative))
            stream, left = receive(response, events, leave_after)
        except BROKEN as error:
            stream, left = ReceivedStream(error=repr(error)), False
        except GreenletExit:  # the run is over
            stream = check_unfinished(began, parse_events(events), self.load_run.profile.stalled_s)
            self.report(check_stream(self.kind, began, question, stream, left=True))
            raise
        self.report(check_stream(self.kind, began, question, stream, left=left))

    def post(self, path: str, body: Any) -> HTTPSocketResponse:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, body=raw, headers=JSON_HEADERS)


def receive(
    response: HTTPSocketResponse, events: list[tuple[float, bytes]], leave_after: int | None
) -> tuple[ReceivedStream, bool]:
    """The stream, and whether the client left before its end. Appends events to `events` as they arrive."""
    try:
        if response.status_code != 200:
            return ReceivedStream(error=f"status {response.status_code}: {response.read()!r:.200}"), False
        while event := response.readline(EVENT_END):
            events.append((time.time(), event))
            if len(events) == leave_after:
                return parse_events(events), True
        return parse_events(events), False
    finally:
        response.release()


class ChatUser(HttpUser):
    kind = "chat"
    weight = 50

    @task
    def chat(self) -> None:
        self.ask(self.load_run.questions.short(chat=True))


class CompletionUser(HttpUser):
    kind = "completion"
    weight = 30

    @task
    def complete(self) -> None:
        self.ask(self.load_run.questions.short(chat=False))


class LongCompletionUser(HttpUser):
    """Sends long prompts."""

    kind = "long"
    weight = 10

    @task
    def complete(self) -> None:
        self.ask(self.load_run.questions.long())


class DisconnectingUser(HttpUser):
    """Closes the connection in the middle of a stream, and comes back on another one."""

    kind = "abandoned"
    weight = 4

    @task
    def leave(self) -> None:
        self.ask(self.load_run.questions.short(chat=True), leave_after=random.randint(1, MAX_CHUNKS_BEFORE_LEAVING))


MALFORMED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b"\xff\xfe"),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "model": "another"}),
    ("/v1/completions", {"prompt": "1", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "1", "stop": [1]}),
    ("/v1/completions", {"prompt": [2**31]}),
    ("/v1/completions", {"prompt": "1", "speculative": {"depth": "deep"}}),
    ("/v1/nothing", {}),
]
"""Each must be refused with a status from 400 to 499 and an error message."""


class MalformedRequestUser(HttpUser):
    """Sends malformed requests."""

    kind = REFUSED
    weight = 4
    wait_time = constant(0.5)

    @task
    def malform(self) -> None:
        path, body = random.choice(MALFORMED)
        began = time.time()
        try:
            response = self.post(path, body)
            with response:
                fault = refusal_fault(response.status_code, response.read())
        except BROKEN as error:
            fault = repr(error)
        now = time.time()
        self.report(StreamRecord(self.kind, began, now, now, fault=fault and f"{path} {body!r:.80}: {fault}"))


def refusal_fault(status: int, body: bytes) -> str:
    """The fault of the response to a malformed request; empty if it was refused correctly."""
    if not 400 <= status < 500:
        return f"status {status}: {body!r:.200}"
    try:
        return "" if json.loads(body)["error"]["message"] else "no message"
    except (ValueError, LookupError, TypeError):
        return f"not an error of the API: {body!r:.200}"
