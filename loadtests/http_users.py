"""Who asks over HTTP. Importing this makes Python's sockets gevent's, as Locust does: not for tests' own processes."""

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
from loadtests.load_requests import Question, Questions
from loadtests.stream_check import ReceivedStream, StreamRecord, check_stream, check_unfinished, parse_events

TIMEOUT_S = 120.0
BROKEN = (OSError, HTTPException, ValueError, LookupError, TypeError)
"""A connection that ends too early, or brings what is no answer."""
JSON_HEADERS = {"Content-Type": "application/json"}
EVENT_END = b"\n\n"
MAX_CHUNKS_BEFORE_LEAVING = 12
"""Events after which an abandoner is gone."""


class RecordingUser(User):
    """`questions`, `speculative` and `stalled_s` (as `Run`'s) are set before the first one is made."""

    abstract = True
    kind: ClassVar[str]
    questions: ClassVar[Questions]
    speculative: ClassVar[bool]
    stalled_s: ClassVar[float]

    def report(self, answer: StreamRecord) -> None:
        """To Locust's tables, and with all that is known to whoever listens."""
        told = answer.fault or (
            f"{answer.lost} tokens lost, {answer.changed} changed" * bool(answer.lost or answer.changed)
        )
        self.environment.events.request.fire(
            request_type=type(self).__name__,
            name=answer.kind,
            response_time=1e3 * (answer.ended - answer.began),
            response_length=answer.tokens,
            exception=RuntimeError(told) if told else None,
            context={"answer": answer},
        )


class HttpUser(RecordingUser):
    """One connection, on which one request follows the other."""

    abstract = True

    def on_start(self) -> None:
        self.http = HTTPClient.from_url(
            self.host or "", concurrency=1, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )

    def on_stop(self) -> None:
        self.http.close()

    def ask(self, question: Question, leave_after: int | None = None) -> None:
        """Stream an answer. `leave_after`: so many events, then the connection is closed."""
        began = time.time()
        events: list[tuple[float, bytes]] = []
        try:
            response = self.post(question.path, question.body(speculative=self.speculative))
            heard, left = listen(response, events, leave_after)
        except BROKEN as error:
            heard, left = ReceivedStream(error=repr(error)), False
        except GreenletExit:  # the run is over
            heard = check_unfinished(began, parse_events(events), self.stalled_s)
            self.report(check_stream(self.kind, began, question, heard, left=True))
            raise
        self.report(check_stream(self.kind, began, question, heard, left=left))

    def post(self, path: str, body: Any) -> HTTPSocketResponse:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, body=raw, headers=JSON_HEADERS)


def listen(
    response: HTTPSocketResponse, events: list[tuple[float, bytes]], leave_after: int | None
) -> tuple[ReceivedStream, bool]:
    """What the stream says, and whether it was left before its end. `events` gets them as they come."""
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
        self.ask(self.questions.short(chat=True))


class CompletionUser(HttpUser):
    kind = "completion"
    weight = 30

    @task
    def complete(self) -> None:
        self.ask(self.questions.short(chat=False))


class LongCompletionUser(HttpUser):
    """Sends long prompts."""

    kind = "long"
    weight = 10

    @task
    def complete(self) -> None:
        self.ask(self.questions.long())


class DisconnectingUser(HttpUser):
    """Goes away in the middle of a stream, and comes back on another connection."""

    kind = "abandoned"
    weight = 4

    @task
    def leave(self) -> None:
        self.ask(self.questions.short(chat=True), leave_after=random.randint(1, MAX_CHUNKS_BEFORE_LEAVING))


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
"""Each must be refused with a status from 400 to 499 that says why."""


class MalformedRequestUser(HttpUser):
    """Sends what cannot be served."""

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
    """What is wrong with the answer to a malformed request; empty: it was refused as it had to be."""
    if not 400 <= status < 500:
        return f"status {status}: {body!r:.200}"
    try:
        return "" if json.loads(body)["error"]["message"] else "no message"
    except (ValueError, LookupError, TypeError):
        return f"not an error of the API: {body!r:.200}"
