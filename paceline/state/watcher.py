"""The workers of one kind as last known, at hand without asking anybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from paceline.state.periodic import Periodic
from paceline.state.presence import Presence
from paceline.state.registry import Kind, Registered, Registry


class Watcher(Periodic):
    """Refreshed in the background for as long as the context lasts: `async with store.watcher("draft")`.

    A worker that the registry no longer lists is gone. But while Redis is away nobody is gone; and when it
    returns, or its memory was wiped, workers get one TTL to announce themselves again.
    """

    def __init__(self, registry: Registry, presence: Presence, kind: Kind, interval_s: float) -> None:
        self.interval_s = interval_s
        self._registry = registry
        self._presence = presence
        self._kind = kind
        self._known: dict[str, Registered] = {}
        self._epoch = ""
        self._lenient_until = 0.0
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> Sequence[Registered]:
        """Oldest first."""
        return sorted(self._known.values(), key=lambda worker: worker.record.started_at)

    async def once(self) -> None:
        """Refresh now."""
        if not await self._presence.attempt(self._refresh()):
            self._be_lenient()

    async def until(self, condition: Callable[[Sequence[Registered]], bool]) -> Sequence[Registered]:
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
            self._be_lenient()
        kept = self._known if time.monotonic() < self._lenient_until else {}
        async with self._changed:
            self._known = {**kept, **listed}
            self._changed.notify_all()

    def _be_lenient(self) -> None:
        self._lenient_until = time.monotonic() + self._registry.ttl_s
