"""What a target says of its load: on a link with its deltas, and to all in the registry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from paceline.core.messages import EngineLoad

DELTA_PRECEDENCE_S = 2.0
"""Heartbeats come every second; for so long after a delta they may be older than that."""
LOAD_TTL_S = 10.0
"""What was said longer ago says nothing: Redis or the target has fallen silent since."""


class TargetLoad:
    """The latest word. Heartbeats that are read twice are one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delta: EngineLoad | None = None
        self._delta_at = self._at = -math.inf
        self._heartbeat: Mapping[str, float] = {}
        self._other_requests = self._waiting = 0.0

    def update_from_delta(self, load: EngineLoad | None, own: int) -> None:
        """The latest load of a link, and how many of the requests are this gateway's."""
        if load is not None and load is not self._delta:
            self._delta, self._delta_at = load, self._clock()
            self._update(load.running, load.waiting, own)

    def update_from_heartbeat(self, heartbeat: Mapping[str, float], own: int) -> None:
        if heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            if self._clock() >= self._delta_at + DELTA_PRECEDENCE_S:
                self._update(heartbeat.get("running", 0.0), heartbeat.get("waiting", 0.0), own)

    @property
    def other_requests(self) -> float:
        """Requests of other gateways. When one of this gateway's ends, nobody says so here again."""
        return self._other_requests if self._recent else 0.0

    @property
    def waiting(self) -> float:
        """Requests of everybody that wait for their first token."""
        return self._waiting if self._recent else 0.0

    @property
    def _recent(self) -> bool:
        return self._clock() < self._at + LOAD_TTL_S

    def _update(self, running: float, waiting: float, own: int) -> None:
        self._at = self._clock()
        self._other_requests, self._waiting = max(0.0, running + waiting - own), waiting
