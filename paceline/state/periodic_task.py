"""Something done again and again in the background, for as long as a context lasts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

logger = logging.getLogger(__name__)


class PeriodicTask(ABC):
    """`async with` runs `once` on entry, then every `interval_s` seconds in a task until exit.

    What it raises on entry is raised there. Later it is logged, and the next turn comes all the same: a worker whose
    heartbeats ended would be given up. An error that stays the same is logged once.

    What is under way at the exit is finished, not cancelled: redis-py may turn a cancellation into an error of
    the connection, and the task would go on for ever.
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
        told = ""
        while not await self._stopped():
            try:
                await self.run_once()
                told = ""
            except Exception as error:
                if repr(error) != told:
                    logger.exception("%s failed and is tried again", type(self).__name__)
                told = repr(error)

    async def _stopped(self) -> bool:
        """Wait until the next turn; whether there is none."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self.interval_s)
        return self._stopping.is_set()
