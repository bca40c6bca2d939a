"""A worker's own record in the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability
from paceline.state.worker_registry import WorkerRecord, WorkerRegistry


class WorkerRegistration(PeriodicTask):
    """Keeps a worker registered while the context lasts.

    Each heartbeat, three per TTL, sends what `load` returns, and `beat`, the heartbeat's number. While Redis is
    unavailable the worker is not registered; the first heartbeat after its return registers it again.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        presence: RedisAvailability,
        record: WorkerRecord,
        load: Callable[[], Mapping[str, float]],
    ) -> None:
        self.interval_s = registry.ttl_s / 3
        self.record = record
        self._registry = registry
        self._presence = presence
        self._load = load
        self._beats = count()

    async def run_once(self) -> None:
        load = {**self._load(), "beat": float(next(self._beats))}
        await self._presence.attempt(self._registry.heartbeat(self.record, load))

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self._presence.attempt(self._registry.deregister(self.record))
