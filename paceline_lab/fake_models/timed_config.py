"""The name of a timed model is its whole configuration: `timed:vocabulary=512,step_ms=10,agreement=0.8`.

A timed model simulates an accelerator: a pass takes the time of its rows, and the output is a hash of the text. See
`paceline_lab.fake_models.timed_model`. No torch is imported.
"""

from __future__ import annotations

from pydantic import Field, ValidationError

from paceline.config import Settings
from paceline.config.validation_messages import error_message

TIMED_PREFIX = "timed:"


class TimedModelConfig(Settings):
    """`vocabulary` and `seed` choose the target; a draft of it has the same ones and an `agreement` below 1."""

    vocabulary: int = Field(512, ge=16, le=65536)
    seed: int = Field(0, ge=0)
    step_ms: float = Field(10.0, ge=0.0, description="a pass of few rows: reading the weights is all it takes")
    knee_rows: int = Field(128, ge=1, description="from here on a pass takes as long as its rows compute")
    overhead_ms: float = Field(
        0.0, ge=0.0, description="of every pass, whatever its rows: launches, scheduling, streams"
    )
    agreement: float = Field(1.0, ge=0.0, le=1.0, description="how often the first choice is the target's, on average")
    spread: float = Field(
        2.0, ge=0.0, le=8.0, description="how much that differs from place to place: deviation of the log-odds"
    )
    blur: float = Field(
        0.7, ge=0.0, le=8.0, description="how wrong a draft is about its own chances: deviation of the log-odds"
    )
    bias: float = Field(0.0, ge=-60.0, le=60.0, description="how much a draft overrates itself, in log-odds")

    @classmethod
    def parse(cls, name: str) -> TimedModelConfig:
        """Raises ValueError if `name` is not `timed:` and `key=value` pairs with commas between."""
        pairs = [pair.partition("=") for pair in name.removeprefix(TIMED_PREFIX).split(",") if pair]
        try:
            return cls.model_validate({key.strip(): value.strip() for key, _, value in pairs}, strict=False)
        except ValidationError as error:
            errors = "; ".join(f"{'.'.join(map(str, e['loc']))}: {error_message(e)}" for e in error.errors())
            raise ValueError(f"{name!r} names no timed model: {errors}") from error

    def seconds(self, rows: int) -> float:
        """Duration of a pass of `rows` rows: the roofline of an accelerator."""
        return (self.overhead_ms + self.step_ms * max(1.0, rows / self.knee_rows)) / 1e3

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the vocabulary: equal for a target and its drafts."""
        return f"{TIMED_PREFIX}vocabulary={self.vocabulary}"
