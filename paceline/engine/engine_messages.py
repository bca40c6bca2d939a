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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine's model, and what drafts need to know of it."""

    fingerprint: str
    vocabulary_size: int
    max_model_len: int
    slots: int
    rows_invariant: bool
    eos_token_ids: Sequence[int]
    layers: int
    method: str
    """Empty without speculation."""
    numerics: str
    rows_per_s: float = 0.0
    """Of full passes, as estimated at start-up; 0: unknown."""
    features: Sequence[str] = ()
    """See `paceline.target_features`."""
    beside: Sequence[str] = ()
    """Further methods than `method`, which draft inside the target."""
