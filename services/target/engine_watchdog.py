"""Notices an engine that hangs: it answers nothing, holds requests, and its process lives."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.state.periodic_task import PeriodicTask

log = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 4
"""Within the limit. Looks are counted, not seconds: a machine that was suspended as a whole did not hang."""


class EngineWatchdog(PeriodicTask):
    """Calls `end` once if the engine makes no step for `limit_s` seconds, for as long as the context lasts."""

    def __init__(self, limit_s: float, busy: Callable[[], bool], end: Callable[[], None]) -> None:
        """`busy`: whether there is anything that it should be working at."""
        self.interval_s = limit_s / CHECKS_PER_TIMEOUT
        self._limit_s = limit_s
        self._busy = busy
        self._kill = end
        self._idle_checks = 0

    def reset(self) -> None:
        """The engine made a step."""
        self._idle_checks = 0

    async def run_once(self) -> None:
        self._idle_checks = self._idle_checks + 1 if self._busy() else 0
        if self._idle_checks == CHECKS_PER_TIMEOUT + 1:
            log.critical("the engine has requests and made no step for %g s: it is ended", self._limit_s)
            self._kill()
