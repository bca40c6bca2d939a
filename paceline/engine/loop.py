"""Steps an engine. Everything else talks to it through a pipe."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.engine.engine import Engine
from paceline.engine.orders import Cancel, Hearsay, Stepped
from paceline.messages import Submission


class EngineLoop:
    """Steps an engine while it is busy and sleeps while it is not, until the pipe closes.

    Every step is told as `Stepped`; a request's deltas, errors too, are in there.
    """

    def __init__(self, engine: Engine, pipe: Pipe) -> None:
        self._engine = engine
        self._pipe = pipe
        # Not at once: the engine reads the pipe, for growth, in the middle of a step, too.
        self._orders: deque[Submission | Cancel | Hearsay] = deque()
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
                    deltas = self._engine.step()
                    self._pipe.send(Stepped(deltas, self._engine.load, self._engine.last_step))

    def _follow_orders(self) -> None:
        while self._orders:
            match self._orders.popleft():
                case Submission() as submission:
                    self._engine.submit(submission)
                case Cancel(request_id):
                    self._engine.cancel(request_id)
                case Hearsay(drafted, accepted):
                    self._engine.seed(drafted, accepted)
