"""What a target's engine is told, and what it tells, when it runs in a process of its own.

A `Submission` is told as it is. Growth and commits have messages of their own, see `paceline.wire.remote_drafting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.messages import Delta, EngineLoad
from paceline.telemetry.step_stats import StepStats


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End this request; its last delta follows, unless it ended meanwhile. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CalibrationSeed:
    """What other targets learned of drafts' confidence: guesses decided and drawn, by `Calibration`'s cells."""

    drafted: Sequence[float]
    accepted: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step was made. `stats` are those of steps since they were last told, itself the last; mostly none."""

    deltas: Sequence[Delta]
    load: EngineLoad
    stats: Sequence[StepStats] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Of the model that the engine runs, and how drafts draft for it."""

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
    """Of full passes, as measured at the start; 0: unknown."""
