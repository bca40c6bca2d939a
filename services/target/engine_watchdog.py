"""Detects an engine that hangs: its process lives and it has requests, but it makes no step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.state.periodic_task import PeriodicTask

log = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 4
"""The watchdog counts checks, not seconds: an engine on a suspended machine does not hang."""


class EngineWatchdog(PeriodicTask):
    """Calls `abort` once if the engine is busy and makes no step for `timeout_s` seconds, while the context lasts."""

    def __init__(self, timeout_s: float, busy: Callable[[], bool], abort: Callable[[], None]) -> None:
        self.interval_s = timeout_s / CHECKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._busy = busy
        self._abort = abort
        self._checks_without_step = 0

    def reset(self) -> None:
        """The engine made a step."""
        self._checks_without_step = 0

    async def run_once(self) -> None:
        self._checks_without_step = self._checks_without_step + 1 if self._busy() else 0
        if self._checks_without_step == CHECKS_PER_TIMEOUT + 1:
            log.critical("the engine has requests and made no step for %g s: it is aborted", self._timeout_s)
            self._abort()
