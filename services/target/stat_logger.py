"""Statistics of a target's requests and steps, for Redis, metrics and the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.policy.calibration import Calibration
from paceline.messages import Delta, TargetDescription
from paceline.state import AcceptanceCounts, AcceptanceRecorder
from paceline.state.periodic_task import PeriodicTask
from paceline.telemetry.acceptance_log import AcceptanceLog
from paceline.telemetry.step_stats import StepStats
from paceline.telemetry.target_metrics import TargetMetrics


class StatLogger(PeriodicTask):
    """Collects the requests and deltas of the servicer and the steps of the engine; publishes steps each second."""

    interval_s = 1.0

    def __init__(self, description: TargetDescription, recorder: AcceptanceRecorder, metrics: TargetMetrics) -> None:
        self._model = description.model
        self._speculator = description.method or "none"
        self._recorder = recorder
        self._metrics = metrics
        self._log = AcceptanceLog()
        self._steps: deque[StepStats] = deque()

    def observe(self, steps: Sequence[StepStats]) -> None:
        """Queue engine steps for the next `run_once`."""
        self._steps.extend(steps)

    def committed(self, delta: Delta) -> None:
        if delta.finish_reason is not None and delta.usage is not None and delta.timings.prefill_s:
            self._metrics.observe_request(delta.timings, delta.usage)

    async def run_once(self) -> None:
        """Publish the steps since the last call."""
        counts, tokens, samples = AcceptanceCounts(), 0, list[tuple[int, bool]]()
        while self._steps:
            step = self._steps.popleft()
            self._metrics.observe_step(step)
            tokens += step.generation_tokens
            if step.speculation.verifications:
                counts += AcceptanceCounts.of(step.speculation)
                samples += step.calibration_samples
        self._log.add(counts, tokens)
        if counts.drafted:
            self._recorder.count(self._model, self._speculator, counts + _calibration_counts(samples))


def _calibration_counts(samples: Sequence[tuple[int, bool]]) -> AcceptanceCounts:
    """Samples (cell, accepted) by cell: targets that start later begin with them."""
    drafted, accepted = [0.0] * Calibration.CELLS, [0.0] * Calibration.CELLS
    for cell, is_accepted in samples:
        drafted[cell] += 1
        accepted[cell] += is_accepted
    return AcceptanceCounts(cell_drafted=drafted, cell_accepted=accepted)
