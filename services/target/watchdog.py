"""Notices an engine that hangs: it answers nothing, holds requests, and its process lives."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.state.periodic import Periodic

log = logging.getLogger(__name__)

LOOKS = 4
"""Within the limit. Looks are counted, not seconds: a machine that was suspended as a whole did not hang."""


class Watchdog(Periodic):
    """Calls `end` once if the engine makes no step for `limit_s` seconds, for as long as the context lasts."""

    def __init__(self, limit_s: float, busy: Callable[[], bool], end: Callable[[], None]) -> None:
        """`busy`: whether there is anything that it should be working at."""
        self.interval_s = limit_s / LOOKS
        self._limit_s = limit_s
        self._busy = busy
        self._end = end
        self._looks = 0

    def stepped(self) -> None:
        """The engine made a step."""
        self._looks = 0

    async def once(self) -> None:
        self._looks = self._looks + 1 if self._busy() else 0
        if self._looks == LOOKS + 1:
            log.critical("the engine has requests and made no step for %g s: it is ended", self._limit_s)
            self._end()
