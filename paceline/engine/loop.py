"""Steps an engine. Everything else talks to it through a pipe."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.engine.engine import Engine
from paceline.engine.orders import Cancel, Hearsay, Stepped
from paceline.messages import Submission
from paceline.telemetry.step import StepStats


class EngineLoop:
    """Steps an engine while it is busy and sleeps while it is not, until the pipe closes.

    Every step is told as `Stepped`, with its deltas, those of errors, too. Statistics go with those steps in which
    they are due, a request ends, or nothing is left to do.
    """

    def __init__(self, engine: Engine, pipe: Pipe) -> None:
        self._engine = engine
        self._pipe = pipe
        # Not at once: the engine reads the pipe, for growth, in the middle of a step, too.
        self._orders: deque[Submission | Cancel | Hearsay] = deque()
        self._untold: list[StepStats] = []
        pipe.deliver(Submission, self._orders.append)
        pipe.deliver(Cancel, self._orders.append)
        pipe.deliver(Hearsay, self._orders.append)

    def run(self) -> None:
        """Return when the pipe is closed. What the engine raises ends the loop."""
        with suppress(PipeClosedError):
            while True:
                # An order may have come while a step read growth, even in the step that ended the last request.
                self._pipe.receive(0.0 if self._engine.busy or self._orders else None)
                self._follow_orders()
                if self._engine.busy:
                    self._pipe.send(self._step())

    def _step(self) -> Stepped:
        engine = self._engine
        deltas = engine.step()
        self._untold.append(engine.last_step)
        due = engine.reports or not engine.busy or any(delta.finish_reason for delta in deltas)
        told, self._untold = (self._untold, []) if due else ([], self._untold)
        return Stepped(deltas, engine.load, told)

    def _follow_orders(self) -> None:
        while self._orders:
            match self._orders.popleft():
                case Submission() as submission:
                    self._engine.submit(submission)
                case Cancel(request_id):
                    self._engine.cancel(request_id)
                case Hearsay(drafted, accepted):
                    self._engine.seed(drafted, accepted)
