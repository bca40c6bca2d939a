"""Whether Redis answers. This is the one place that swallows its absence, on purpose.

All background work goes through `RedisAvailability.attempt`, so the loss of Redis is one log line, its return another,
and serving continues.
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
        """Await an operation that asks Redis something. Returns False if it did not answer: repeat the operation."""
        try:
            await operation
        except StateUnavailableError as error:
            if self._lost_at is None:
                self._lost_at = time.monotonic()
                logger.warning("Redis is away, serving continues without it", extra={"error": str(error)})
            return False
        if self._lost_at is not None:
            logger.info("Redis is back", extra={"away_s": round(time.monotonic() - self._lost_at, 1)})
            self._lost_at = None
        return True
