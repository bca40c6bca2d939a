"""Keeps a set of programs running, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Self

from paceline.cli.supervised_process import Program, SupervisedProcess
from paceline.launcher import Backoff, StartError

log = logging.getLogger(__name__)

STARTING_STOP_S = 2.0
"""How long a program that was never ready may take to end: it has no requests to finish."""


class Supervisor:
    """Runs programs while the context lasts.

    All start at once. Groups stop in the order given, `[[gateway], targets, drafts]`: each group ends before the next
    one gets SIGTERM. A program that does not end within its `stop_s` is killed.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Program]],
        log_line: Callable[[str], None],
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """`log_line` is called with every line that a program writes."""
        self._groups = [[SupervisedProcess(program, log_line, backoff()) for program in group] for group in groups]
        self._running: dict[SupervisedProcess, asyncio.Task[None]] = {}

    @property
    def children(self) -> dict[str, SupervisedProcess]:
        """By name."""
        return {child.program.name: child for group in self._groups for child in group}

    async def until(self, condition: Awaitable[object], spared: Collection[str] = ()) -> None:
        """Await `condition`: the programs are ready. From then on, every program that dies is restarted.

        Raises `StartError` if a program cannot start before that, unless the others are served without it: `spared`.
        """
        ready, starting = asyncio.ensure_future(condition), dict(self._running)
        try:
            while not ready.done():
                await asyncio.wait([ready, *starting.values()], return_when=asyncio.FIRST_COMPLETED)
                for child in [each for each, task in starting.items() if task.done() and not ready.done()]:
                    try:
                        starting.pop(child).result()
                    except StartError as error:
                        if child.program.name not in spared:
                            raise
                        log.error("%s: the others serve without it", error)
            await ready
        finally:
            ready.cancel()
        for child in self._running:
            child.was_ready = True

    def task(self, name: str) -> asyncio.Task[None]:
        """Done when a program has ended for good."""
        return self._running[self.children[name]]

    def kill(self) -> None:
        """Kill all programs now."""
        for child in self._running:
            child.kill()

    async def __aenter__(self) -> Self:
        for name, child in self.children.items():
            self._running[child] = asyncio.create_task(child.run(), name=name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for group in self._groups:
            await asyncio.gather(*map(self._stop, group))

    async def _stop(self, child: SupervisedProcess) -> None:
        running = self._running[child]
        child.stop()
        limit_s = child.program.stop_s if child.was_ready else min(child.program.stop_s, STARTING_STOP_S)
        _, late = await asyncio.wait([running], timeout=limit_s)
        if late:
            log.warning("%s did not stop within %g s and is killed", child.program.name, limit_s)
            child.kill()
            await asyncio.wait([running])
        running.exception()  # retrieve it: `until` raised it already
