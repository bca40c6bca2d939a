"""The workers of one kind as last known, at hand without asking anybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRegistry


class WorkerWatcher(PeriodicTask):
    """Refreshed in the background for as long as the context lasts: `async with store.watcher("draft")`.

    A worker that the registry no longer lists is gone. But while Redis is away nobody is gone; and when it
    returns, or its memory was wiped, workers get one TTL to announce themselves again.
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
        """Wait until the known workers are as wanted, and return them."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self.workers))
            return self.workers

    async def _refresh(self) -> None:
        listed = {worker.record.worker_id: worker for worker in await self._registry.workers(self._kind)}
        # Asked after the listing: a wipe between the two then makes us lenient too early, never too late.
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
