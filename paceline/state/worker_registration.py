"""A worker's own place in the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability
from paceline.state.worker_registry import WorkerRecord, WorkerRegistry


class WorkerRegistration(PeriodicTask):
    """Keeps a worker registered for as long as the context lasts.

    `load` is asked for the worker's load at each heartbeat, three per TTL; `beat`, which one it is, is added. If Redis
    is away the worker is not registered; the first heartbeat after its return mends that.
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
