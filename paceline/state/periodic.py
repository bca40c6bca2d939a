"""Something done again and again in the background, for as long as a context lasts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Self

logger = logging.getLogger(__name__)


class Periodic(ABC):
    """`async with` runs `once` on entry, then every `interval_s` seconds in a task until exit."""

    interval_s: float

    @abstractmethod
    async def once(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.once()
        self._task = asyncio.create_task(self._run(), name=type(self).__name__)
        self._task.add_done_callback(self._report)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            await self.once()

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            logger.critical("%s stopped", task.get_name(), exc_info=task.exception())
