"""The load that a target reports: with its deltas on the link, and with its heartbeats in the registry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from paceline.messages import EngineLoad

DELTA_PRECEDENCE_S = 2.0
"""Heartbeats come every second; for this long after a delta, a heartbeat may be older than it."""
LOAD_TTL_S = 10.0
"""An older load is unknown: Redis or the target has failed since."""


class TargetLoad:
    """The latest load. The same heartbeat, read again, changes nothing; no two heartbeats are equal, since each carries
    its number (`WorkerRegistration`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delta: EngineLoad | None = None
        self._delta_at = self._at = -math.inf
        self._registered_load: Mapping[str, float] = {}
        self._other_requests = self._waiting = 0.0

    def update_from_delta(self, load: EngineLoad | None, own: int) -> None:
        """`load`: the link's latest one. `own`: this gateway's requests at the target."""
        if load is not None and load is not self._delta:
            self._delta, self._delta_at = load, self._clock()
            self._update(load.running, load.waiting, own)

    def update_from_registry(self, registered_load: Mapping[str, float], own: int) -> None:
        if registered_load != self._registered_load:
            self._registered_load = registered_load
            if self._clock() >= self._delta_at + DELTA_PRECEDENCE_S:
                self._update(registered_load.get("running", 0.0), registered_load.get("waiting", 0.0), own)

    @property
    def other_requests(self) -> float:
        """Requests of other gateways at the time of the load. Not refreshed when our own requests end."""
        return self._other_requests if self._recent else 0.0

    @property
    def waiting(self) -> float:
        """Requests of all gateways without a first token."""
        return self._waiting if self._recent else 0.0

    @property
    def _recent(self) -> bool:
        return self._clock() < self._at + LOAD_TTL_S

    def _update(self, running: float, waiting: float, own: int) -> None:
        self._at = self._clock()
        self._other_requests, self._waiting = max(0.0, running + waiting - own), waiting
