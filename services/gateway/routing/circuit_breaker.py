"""Circuit breaker: sends a worker nothing for a while after repeated failures.

    closed ── FAILURES in a row ──▶ open ── after a while ──▶ half-open ── first token ──▶ closed
                                      ▲                          │
                                      └── failure: twice as long ┘

Published breakers (pybreaker, aiobreaker, purgatory) wrap a call and always wait equally long. Here one of many workers
is chosen, the outcome is known with the first token, and one request probes while others go to other workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class BreakerState(IntEnum):
    """The values are those in `/metrics`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """The breaker of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = 0.0  # the latest one, until a success
        self._until: float | None = None  # None: closed
        self._probe: object = None

    @property
    def state(self) -> BreakerState:
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == BreakerState.CLOSED or (self.state == BreakerState.HALF_OPEN and self._probe is None)

    @property
    def probe_in_s(self) -> float:
        """Seconds until a request may probe; 0: now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def on_sent(self, request: object) -> None:
        """A request is sent. While half-open it is the probe; one of the calls below reports its outcome."""
        self._probe = request if self.state == BreakerState.HALF_OPEN else None

    def on_first_token(self) -> None:
        """The first token ends a probe. The next failure opens the breaker again, for longer."""
        if self.state == BreakerState.HALF_OPEN:
            self._until, self._failures, self._probe = None, FAILURES - 1, None

    def on_success(self) -> None:
        """A request has succeeded."""
        self._failures, self._pause_s, self._until, self._probe = 0, 0.0, None, None

    def on_failure(self) -> bool:
        """Whether this failure opens the breaker. Failures while it is open do not prolong the pause."""
        self._failures += 1
        state = self.state
        opens = state == BreakerState.HALF_OPEN or (state == BreakerState.CLOSED and self._failures >= FAILURES)
        if opens:
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._until = self._clock() + self._pause_s
        self._probe = None
        return opens

    def on_abandoned(self, request: object) -> None:
        """The request ended without an outcome, as when its client left. After the probe, the next one may probe."""
        if request is self._probe:
            self._probe = None
