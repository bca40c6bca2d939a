"""Work repeated in the background while a context lasts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

logger = logging.getLogger(__name__)


class PeriodicTask(ABC):
    """`async with` calls `run_once` on entry, then every `interval_s` seconds in a task until exit.

    An error of the first call is raised on entry. Later errors are logged and the task continues: a worker whose
    heartbeats ended would be dropped. An error that repeats is logged once.

    The exit lets a running call finish and does not cancel it: redis-py may turn a cancellation into a connection
    error, and the task would never end.
    """

    interval_s: float

    @abstractmethod
    async def run_once(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.run_once()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=type(self).__name__)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping.set()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        logged = ""
        while not await self._stopped():
            try:
                await self.run_once()
                logged = ""
            except Exception as error:
                if repr(error) != logged:
                    logger.exception("%s failed and is tried again", type(self).__name__)
                logged = repr(error)

    async def _stopped(self) -> bool:
        """Wait `interval_s` seconds, or less if the exit comes first; return whether it came."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self.interval_s)
        return self._stopping.is_set()
