"""What a target remembers of its requests and steps for others: Redis, metrics, and the line in the log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.messages import Delta, SpeculationStats, Submission, TargetDescription
from paceline.core.policy.calibration import Calibration
from paceline.state import AcceptanceCounts, AcceptanceRecorder, RequestState
from paceline.state.periodic_task import PeriodicTask
from paceline.telemetry.acceptance_log import INTERVAL_S, AcceptanceLog
from paceline.telemetry.step_stats import StepStats
from paceline.telemetry.target_metrics import TargetMetrics

MOVING_AVERAGE_WEIGHT = 0.1
"""Weight of the last step in a request's moving average of accepted tokens."""


@dataclass(slots=True)
class _RequestProgress:
    """One running request, as far as its deltas told."""

    submission: Submission
    model: str
    speculator: str
    committed: list[int]
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    moving_average: float = 0.0

    def take(self, delta: Delta) -> None:
        self.committed += delta.tokens
        self.moving_average += MOVING_AVERAGE_WEIGHT * (sum(delta.accepted) - self.moving_average)
        if delta.speculation is not None:
            self.speculation = delta.speculation

    def state(self) -> RequestState:
        return RequestState(
            request_id=self.submission.request_id,
            model=self.model,
            speculator=self.speculator,
            seed=self.submission.sampling.seed,
            prompt_length=len(self.submission.prompt),
            committed=tuple(self.committed),
            drafted_by_depth=tuple(self.speculation.drafted_by_depth),
            accepted_by_depth=tuple(self.speculation.accepted_by_depth),
            moving_average=self.moving_average,
            drafts=tuple(self.speculation.drafts),
            updated_at=time.time(),
        )


class StatLogger(PeriodicTask):
    """The servicer's `Observer`, and told of every step, for as long as the context lasts."""

    interval_s = 1.0

    def __init__(self, description: TargetDescription, recorder: AcceptanceRecorder, metrics: TargetMetrics) -> None:
        self._model = description.model
        self._speculator = description.method or "none"
        self._recorder = recorder
        self._metrics = metrics
        self._log = AcceptanceLog()
        self._logged_at = time.monotonic()
        self._steps: deque[StepStats] = deque()
        self._requests: dict[str, _RequestProgress] = {}

    def observe(self, steps: Sequence[StepStats]) -> None:
        """Engine steps; they are counted in a moment."""
        self._steps.extend(steps)

    def submitted(self, engine_id: str, submission: Submission) -> None:
        committed = list(submission.committed)
        self._requests[engine_id] = _RequestProgress(submission, self._model, self._speculator, committed)

    def committed(self, delta: Delta) -> None:
        progress = self._requests[delta.request_id]
        progress.take(delta)
        self._recorder.save(progress.submission.request_id, progress.state)

    def finished(self, engine_id: str) -> None:
        self._recorder.finish(self._requests.pop(engine_id).submission.request_id)

    async def run_once(self) -> None:
        """Pass on the steps that have come together."""
        counts, guesses = AcceptanceCounts(), list[tuple[int, bool]]()
        while self._steps:
            step = self._steps.popleft()
            self._log.add(step.speculation, step.generation_tokens)
            self._metrics.observe_step(step)
            if step.speculation.verifications:
                counts += AcceptanceCounts.of(step.speculation)
                guesses += step.calibration_samples
        if counts.drafted:
            self._recorder.count(self._model, self._speculator, counts + _calibration_counts(guesses))
        if time.monotonic() - self._logged_at >= INTERVAL_S:
            self._logged_at = time.monotonic()
            self._log.emit()


def _calibration_counts(guesses: Sequence[tuple[int, bool]]) -> AcceptanceCounts:
    """The counts that calibration starts from next time."""
    drafted, accepted = [0.0] * Calibration.CELLS, [0.0] * Calibration.CELLS
    for cell, drawn in guesses:
        drafted[cell] += 1
        accepted[cell] += drawn
    return AcceptanceCounts(cell_drafted=drafted, cell_accepted=accepted)
