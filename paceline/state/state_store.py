"""Shared state as a service holds it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.state.acceptance import AcceptanceStore
from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.memory_store import MemoryAcceptance, MemoryRegistry
from paceline.state.redis_acceptance import RedisAcceptance
from paceline.state.redis_availability import RedisAvailability
from paceline.state.redis_client import REDIS_TIMEOUT_S, check, connect
from paceline.state.redis_registry import RedisRegistry
from paceline.state.worker_registration import WorkerRegistration
from paceline.state.worker_registry import WorkerKind, WorkerRecord, WorkerRegistry
from paceline.state.worker_watcher import WorkerWatcher
from paceline.tls import Certificates

HEARTBEAT_TTL_S = 6.0
HALF_LIFE_S = 3600.0
REFRESH_S = 0.5
WRITE_S = 1.0


@dataclass(frozen=True, slots=True)
class StateStore:
    """The registry and what is known about acceptance; on top of them, background work that outlives a loss.

    Calls on `registry` and `acceptance` themselves raise `StateUnavailableError` when Redis is away. What the
    methods return never does.
    """

    registry: WorkerRegistry
    acceptance: AcceptanceStore
    presence: RedisAvailability = field(default_factory=RedisAvailability)

    def registration(self, record: WorkerRecord, load: Callable[[], Mapping[str, float]] = dict) -> WorkerRegistration:
        """Use with `async with`: the worker is registered for as long as that lasts."""
        return WorkerRegistration(self.registry, self.presence, record, load)

    def watcher(self, kind: WorkerKind, interval_s: float = REFRESH_S) -> WorkerWatcher:
        """Use with `async with`: `workers` is kept fresh for as long as that lasts."""
        return WorkerWatcher(self.registry, self.presence, kind, interval_s)

    def recorder(self, interval_s: float = WRITE_S) -> AcceptanceRecorder:
        """Use with `async with`: what it is told is written every `interval_s` seconds, and at the end."""
        return AcceptanceRecorder(self.acceptance, self.presence, interval_s)


@asynccontextmanager
async def open_store(
    redis_url: str | None,
    *,
    ttl_s: float = HEARTBEAT_TTL_S,
    half_life_s: float = HALF_LIFE_S,
    timeout_s: float = REDIS_TIMEOUT_S,
    tls: Certificates | None = None,
) -> AsyncIterator[StateStore]:
    """Shared state at `redis_url`, or None: in this process's memory, seen by nobody else.

    `ttl_s`: how long a worker that fell silent stays listed. `timeout_s`: how long Redis may take to answer.
    `tls`: what a `rediss://` URL uses where it does not name files of its own.
    Raises `StateError` if the URL is none or nobody answers there.
    """
    if redis_url is None:
        yield StateStore(MemoryRegistry(ttl_s), MemoryAcceptance(half_life_s))
        return
    async with connect(redis_url, timeout_s, tls) as client:
        await check(client, redis_url)
        yield StateStore(RedisRegistry(client, ttl_s), RedisAcceptance(client, half_life_s))
