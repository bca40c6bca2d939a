"""A set of programs that are kept running, and stopped in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from paceline.cli.supervised_process import Backoff, Program, SupervisedProcess

log = logging.getLogger(__name__)

Result = TypeVar("Result")

UNSETTLED_STOP_S = 2.0
"""A program that was never up serves nobody: it need not finish anything, such as loading its model."""


class Supervisor:
    """Runs programs for as long as the context lasts.

    They are given in groups, in the order in which these are to stop: `[[gateway], targets, drafts]`. Each group
    ends before the next one is asked to; a program that does not end within its `stop_s` is killed. All start at
    once.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Program]],
        say: Callable[[str], None],
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """`say` gets every line that a program writes."""
        self._groups = [[SupervisedProcess(program, say, backoff()) for program in group] for group in groups]
        self._running: dict[SupervisedProcess, asyncio.Task[None]] = {}

    @property
    def children(self) -> dict[str, SupervisedProcess]:
        """By name."""
        return {child.program.name: child for group in self._groups for child in group}

    async def until(self, condition: Awaitable[Result]) -> Result:
        """Await what the programs are started for. From then on, whatever dies is started again.

        Raises `ServiceStartError` if before that a program cannot start.
        """
        wanted = asyncio.ensure_future(condition)
        try:
            await asyncio.wait([wanted, *self._running.values()], return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                self._raise_failure()
            result = await wanted
        finally:
            wanted.cancel()
        for child in self._running:
            child.was_ready = True
        return result

    def kill(self) -> None:
        """End everything now."""
        for child in self._running:
            child.kill()

    async def __aenter__(self) -> Self:
        for name, child in self.children.items():
            self._running[child] = asyncio.create_task(child.run(), name=name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for group in self._groups:
            await asyncio.gather(*map(self._stop, group))

    def _raise_failure(self) -> None:
        for task in self._running.values():
            if task.done():
                task.result()

    async def _stop(self, child: SupervisedProcess) -> None:
        running = self._running[child]
        child.stop()
        limit_s = child.program.stop_s if child.was_ready else min(child.program.stop_s, UNSETTLED_STOP_S)
        _, late = await asyncio.wait([running], timeout=limit_s)
        if late:
            log.warning("%s did not stop within %g s and is killed", child.program.name, limit_s)
            child.kill()
            await asyncio.wait([running])
        running.exception()  # retrieved: what it failed with was raised by `until`
