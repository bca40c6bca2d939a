"""The live workers of one kind, kept in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRegistry


class WorkerWatcher(PeriodicTask):
    """Reads the registry every `interval_s` seconds while the context lasts: `async with store.watcher("draft")`.

    A worker that the registry no longer lists is dropped, with one exception: while Redis is unavailable, and for one
    TTL after it returns or its memory was wiped, no worker is dropped, so that workers have time to register again.
    """

    def __init__(
        self, registry: WorkerRegistry, presence: RedisAvailability, kind: WorkerKind, interval_s: float
    ) -> None:
        self.interval_s = interval_s
        self._registry = registry
        self._presence = presence
        self._kind = kind
        self._known: dict[str, RegisteredWorker] = {}
        self._epoch = ""
        self._grace_until = 0.0
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> Sequence[RegisteredWorker]:
        """Oldest first."""
        return sorted(self._known.values(), key=lambda worker: worker.record.started_at)

    async def run_once(self) -> None:
        """Refresh now."""
        if not await self._presence.attempt(self._refresh()):
            self._start_grace_period()

    async def wait_for(self, condition: Callable[[Sequence[RegisteredWorker]], bool]) -> Sequence[RegisteredWorker]:
        """Wait until the condition holds for the known workers, and return them."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self.workers))
            return self.workers

    async def _refresh(self) -> None:
        listed = {worker.record.worker_id: worker for worker in await self._registry.workers(self._kind)}
        # Read after the listing: a wipe between the two then starts the grace period too early, never too late.
        epoch = await self._registry.epoch()
        if epoch != self._epoch:
            self._epoch = epoch
            self._start_grace_period()
        kept = self._known if time.monotonic() < self._grace_until else {}
        async with self._changed:
            self._known = {**kept, **listed}
            self._changed.notify_all()

    def _start_grace_period(self) -> None:
        self._grace_until = time.monotonic() + self._registry.ttl_s
