"""Whether Redis is there: the one place where its absence is swallowed, on purpose.

Everything that runs in the background goes through `RedisAvailability.attempt`. So the loss of Redis is one log line,
its return another, and nothing else: serving continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable

from paceline.state.state_errors import StateUnavailableError

logger = logging.getLogger(__name__)


class RedisAvailability:
    """Shared by all background work of one store. Used from one event loop."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    @property
    def unavailable(self) -> bool:
        return self._lost_at is not None

    async def attempt(self, operation: Awaitable[object]) -> bool:
        """Await an operation on the store; False if Redis was away, so that it must be done again."""
        try:
            await operation
        except StateUnavailableError as error:
            self._went_away(error)
            return False
        self._came_back()
        return True

    def _went_away(self, error: StateUnavailableError) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            logger.warning("Redis is away, serving continues without it", extra={"error": str(error)})

    def _came_back(self) -> None:
        if self._lost_at is not None:
            away_s = time.monotonic() - self._lost_at
            self._lost_at = None
            logger.info("Redis is back", extra={"away_s": round(away_s, 1)})
