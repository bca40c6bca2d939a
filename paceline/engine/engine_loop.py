"""Runs an engine at one end of a pipe, and the messages between a target service and it, beside `GenerationRequest`.

Growth and commits have messages of their own, see `paceline.wire.remote_draft_client`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from paceline.ipc.pipe import Pipe, PipeClosedError
from paceline.messages import Delta, EngineLoad, GenerationRequest
from paceline.telemetry.step_stats import StepStats


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End this request; its final delta follows unless it ended meanwhile. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CalibrationCounts:
    """Calibration counts of other targets, by cell of `Calibration`."""

    drafted: Sequence[float]
    accepted: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step."""

    deltas: Sequence[Delta]
    load: EngineLoad
    stats: Sequence[StepStats] = ()
    """Statistics of this step and the steps whose statistics were not sent yet; mostly empty."""


class SteppedEngine(Protocol):
    """What computes for a target worker: `paceline.engine.engine.Engine`, `paceline.vllm.vllm_engine.VllmEngine`."""

    @property
    def stats_due(self) -> bool:
        """Whether the last step's deltas carry statistics. Final deltas always do."""

    @property
    def last_step(self) -> StepStats: ...

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""

    def submit(self, request: GenerationRequest) -> None:
        """Take in a request. If it cannot be served, the next step returns a delta with the error."""

    def cancel(self, request_id: str) -> None:
        """End a request; the next step returns its final delta. Unknown ids are ignored."""

    def start_calibration(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from the calibration counts of other engines, by cell."""

    def overlapped_step(self, deliver: Callable[[list[Delta]], None]) -> None:
        """Run one forward pass, if there is anything to run. `deliver` gets the new deltas of each step once: of this
        step, or of the one before while this pass computes."""


class EngineLoop:
    """Steps an engine while it is busy and sleeps while it is not, until the pipe closes.

    Of each step a `StepResult` is sent. Step statistics are batched: they are sent when they are due, when a request
    ends, and when the engine becomes idle.
    """

    def __init__(self, engine: SteppedEngine, pipe: Pipe) -> None:
        self._engine = engine
        self._pipe = pipe
        # Messages are queued, not handled at once: the engine also reads the pipe, for growth, in the middle of a step.
        self._messages: deque[GenerationRequest | CancelRequest | CalibrationCounts] = deque()
        self._unsent_stats: list[StepStats] = []
        pipe.on(GenerationRequest, self._messages.append)
        pipe.on(CancelRequest, self._messages.append)
        pipe.on(CalibrationCounts, self._messages.append)

    def run(self) -> None:
        """Return when the pipe is closed. Exceptions of the engine end the loop."""
        with suppress(PipeClosedError):
            while True:
                # A step may have queued messages, even the step that ended the last request.
                self._pipe.receive(0.0 if self._engine.busy or self._messages else None)
                self._handle_messages()
                if self._engine.busy:
                    self._engine.overlapped_step(self._send)

    def _send(self, deltas: list[Delta]) -> None:
        engine = self._engine
        self._unsent_stats.append(engine.last_step)
        due = engine.stats_due or not engine.busy or any(delta.finish_reason for delta in deltas)
        stats, self._unsent_stats = (self._unsent_stats, []) if due else ([], self._unsent_stats)
        self._pipe.send(StepResult(deltas, engine.load, stats))

    def _handle_messages(self) -> None:
        while self._messages:
            match self._messages.popleft():
                case GenerationRequest() as request:
                    self._engine.submit(request)
                case CancelRequest(request_id):
                    self._engine.cancel(request_id)
                case CalibrationCounts(drafted, accepted):
                    self._engine.start_calibration(drafted, accepted)
