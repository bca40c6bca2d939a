"""When an engine did what for one request."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.messages import Timings


@dataclass(slots=True)
class RequestTimes:
    """By the engine's clock, in seconds."""

    arrived: float
    started: float | None = None
    """When its first rows ran."""
    first_token: float | None = None
    """When it had its first token from this engine."""
    compute_s: float = 0.0

    def timings(self, now: float) -> Timings:
        """Of a request that ends now."""
        started = now if self.started is None else self.started
        prefill_s = 0.0 if self.first_token is None else self.first_token - started
        return Timings(started - self.arrived, self.compute_s, now - self.arrived, prefill_s)
