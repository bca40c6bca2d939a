"""A thread that steps an engine. Everything else talks to the engine through it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from paceline.engine.engine import Engine
from paceline.messages import Delta, FinishReason, Load, Submission

log = logging.getLogger(__name__)

Deliver = Callable[[list[Delta], Load], None]


class EngineLoop:
    """Steps an engine while it is busy and sleeps while it is not. Its methods may be called from any thread.

    `deliver` is called on the engine's thread, once per step that has news.
    """

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self.ended: Future[None] = Future()
        """Done when the thread is; with the exception if it failed."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """Take in a request; everything about it, errors too, comes through `deliver`."""
        self._inbox.put(lambda: self._submit(submission))

    def cancel(self, request_id: str) -> None:
        """End a request; its last delta follows, unless it ended meanwhile. Unknown ids are ignored."""
        self._inbox.put(lambda: self._engine.cancel(request_id))

    def stop(self, drain_s: float) -> bool:
        """Refuse new requests, give running ones `drain_s` seconds, then end the thread. Whether all finished."""
        self._draining.set()
        self._inbox.put(lambda: None)
        self._thread.join(drain_s)
        self._stopping.set()
        self._inbox.put(lambda: None)
        self._thread.join()
        return not self._engine.busy

    def _submit(self, submission: Submission) -> None:
        if self._draining.is_set():
            refusal = Delta(submission.request_id, finish_reason=FinishReason.ERROR, error="this target drains")
            self._deliver([refusal], self._engine.load)
            return
        self._engine.submit(submission)

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:
            # The thread is all there is to a target: without it nothing is served, and somebody must restart it.
            log.critical("the engine failed", exc_info=True)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _step_until_stopped(self) -> None:
        while not self._stopping.is_set():
            self._receive()
            if self._engine.busy:
                deltas = self._engine.step()
                if deltas:
                    self._deliver(deltas, self._engine.load)
            elif self._draining.is_set():
                return

    def _receive(self) -> None:
        """Handle what has come in; wait for something if there is nothing to step."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.busy and not self._draining.is_set())
            except queue.Empty:
                return
            command()
