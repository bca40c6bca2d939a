"""Messages between a target service and its engine process, beside `GenerationRequest`.

Growth and commits have messages of their own, see `paceline.wire.remote_draft_client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.messages import Delta, EngineLoad
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
