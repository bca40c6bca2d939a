"""Shared state as a service holds it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.state.acceptance import AcceptanceStore
from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.memory_store import MemoryAcceptance, MemoryRegistry
from paceline.state.record_store import RecordLimits, RecordStore
from paceline.state.redis_availability import RedisAvailability
from paceline.state.state_errors import StateUnavailableError
from paceline.state.worker_registration import WorkerRegistration
from paceline.state.worker_registry import WorkerKind, WorkerRecord, WorkerRegistry
from paceline.state.worker_watcher import WorkerWatcher
from paceline.tls import Certificates

HEARTBEAT_TTL_S = 6.0
HALF_LIFE_S = 3600.0
REFRESH_S = 0.5
WRITE_S = 1.0
REDIS_TIMEOUT_S = 1.0
DEFAULT_LIMITS = RecordLimits()


@dataclass(frozen=True, slots=True)
class StateStore:
    """The registry, the stores, and background work on top of them that survives a loss of Redis.

    Calls on `registry`, `acceptance` and `records` raise `StateUnavailableError` while Redis does not answer. The
    background work (`registration`, `watcher`, `recorder`) never does; each is an async context manager.
    """

    registry: WorkerRegistry
    acceptance: AcceptanceStore
    kept_records: RecordStore | None = None
    presence: RedisAvailability = field(default_factory=RedisAvailability)

    @property
    def records(self) -> RecordStore:
        """Raises `StateUnavailableError` without Redis: nothing is kept for clients in memory."""
        if self.kept_records is None:
            raise StateUnavailableError("responses and journals are kept in Redis only")
        return self.kept_records

    def registration(self, record: WorkerRecord, load: Callable[[], Mapping[str, float]] = dict) -> WorkerRegistration:
        return WorkerRegistration(self.registry, self.presence, record, load)

    def watcher(self, kind: WorkerKind, interval_s: float = REFRESH_S) -> WorkerWatcher:
        return WorkerWatcher(self.registry, self.presence, kind, interval_s)

    def recorder(self, interval_s: float = WRITE_S) -> AcceptanceRecorder:
        return AcceptanceRecorder(self.acceptance, self.presence, interval_s)


@asynccontextmanager
async def open_store(
    redis_url: str | None,
    *,
    ttl_s: float = HEARTBEAT_TTL_S,
    half_life_s: float = HALF_LIFE_S,
    timeout_s: float = REDIS_TIMEOUT_S,
    tls: Certificates | None = None,
    records: RecordLimits = DEFAULT_LIMITS,
) -> AsyncIterator[StateStore]:
    """Shared state at `redis_url`; None: registry and acceptance in the memory of this process.

    `ttl_s`: how long a worker stays listed after its last heartbeat. `half_life_s`: of acceptance totals in Redis.
    `timeout_s`: how long Redis may take to answer. `tls`: certificate files for a `rediss://` URL that names none.
    `records`: limits of what is kept for clients. Raises `StateError` if the URL is malformed or Redis
    does not answer.
    """
    if redis_url is None:
        yield StateStore(MemoryRegistry(ttl_s), MemoryAcceptance())
        return
    # Not at the top: what only starts services does so before it loads redis.
    from paceline.state.redis_client import check, connect
    from paceline.state.redis_records import RedisRecords
    from paceline.state.redis_store import RedisAcceptance, RedisRegistry

    async with connect(redis_url, timeout_s, tls) as client:
        await check(client, redis_url)
        yield StateStore(
            RedisRegistry(client, ttl_s), RedisAcceptance(client, half_life_s), RedisRecords(client, records)
        )
