"""Leaving alone for a while what keeps failing.

    closed ── FAILURES in a row ──▶ open ── after a while ──▶ half-open ── one answer ──▶ closed
                                      ▲                          │
                                      └── failure: twice as long ┘

Published breakers (pybreaker, aiobreaker, purgatory) wrap a call and wait equally long every time. Here a choice is
made among many, its verdict comes with the first token, and one request probes while the others go elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class BreakerState(IntEnum):
    """The numbers are those in `/metrics`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = 0.0  # the latest one, until a request ends well
        self._until: float | None = None  # None: closed
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == BreakerState.CLOSED or (self.state == BreakerState.HALF_OPEN and not self._probing)

    @property
    def opens_in_s(self) -> float:
        """Seconds until a request may probe; 0 if one may now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def on_sent(self) -> None:
        """A request is on its way. While half-open it is the probe: what comes of it must follow."""
        self._probing = self.state == BreakerState.HALF_OPEN

    def on_first_token(self) -> None:
        """The first token is there, which is all that a probe waits for. The next failure opens again, for longer."""
        if self.state == BreakerState.HALF_OPEN:
            self._until, self._failures, self._probing = None, FAILURES - 1, False

    def on_success(self) -> None:
        """A request has ended well."""
        self._failures, self._pause_s, self._until, self._probing = 0, 0.0, None, False

    def on_failure(self) -> None:
        """What was sent before a pause, and fails during it, does not prolong it."""
        self._failures += 1
        if self.state == BreakerState.HALF_OPEN or (self.state == BreakerState.CLOSED and self._failures >= FAILURES):
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._until = self._clock() + self._pause_s
        self._probing = False

    def on_abandoned(self) -> None:
        """The request ended without telling anything, as when its client left: the next one may probe."""
        self._probing = False
