"""Shared state as a service holds it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.state.acceptance import AcceptanceStore
from paceline.state.memory import MemoryAcceptance, MemoryRegistry
from paceline.state.presence import Presence
from paceline.state.recorder import Recorder
from paceline.state.redis_acceptance import RedisAcceptance
from paceline.state.redis_client import TIMEOUT_S, check, connect
from paceline.state.redis_registry import RedisRegistry
from paceline.state.registration import Registration
from paceline.state.registry import Kind, Registry, WorkerRecord
from paceline.state.watcher import Watcher
from paceline.tls import Certificates

TTL_S = 6.0
HALF_LIFE_S = 3600.0
REFRESH_S = 0.5
WRITE_S = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """The registry and what is known about acceptance; on top of them, background work that outlives a loss.

    Calls on `registry` and `acceptance` themselves raise `StateLostError` when Redis is away. What the
    methods return never does.
    """

    registry: Registry
    acceptance: AcceptanceStore
    presence: Presence = field(default_factory=Presence)

    def registration(self, record: WorkerRecord, load: Callable[[], Mapping[str, float]] = dict) -> Registration:
        """Use with `async with`: the worker is registered for as long as that lasts."""
        return Registration(self.registry, self.presence, record, load)

    def watcher(self, kind: Kind, interval_s: float = REFRESH_S) -> Watcher:
        """Use with `async with`: `workers` is kept fresh for as long as that lasts."""
        return Watcher(self.registry, self.presence, kind, interval_s)

    def recorder(self, interval_s: float = WRITE_S) -> Recorder:
        """Use with `async with`: what it is told is written every `interval_s` seconds, and at the end."""
        return Recorder(self.acceptance, self.presence, interval_s)


@asynccontextmanager
async def open_store(
    redis_url: str | None,
    *,
    ttl_s: float = TTL_S,
    half_life_s: float = HALF_LIFE_S,
    timeout_s: float = TIMEOUT_S,
    tls: Certificates | None = None,
) -> AsyncIterator[Store]:
    """Shared state at `redis_url`, or None: in this process's memory, seen by nobody else.

    `ttl_s`: how long a worker that fell silent stays listed. `timeout_s`: how long Redis may take to answer.
    `tls`: what a `rediss://` URL uses where it does not name files of its own.
    Raises `StateError` if the URL is none or nobody answers there.
    """
    if redis_url is None:
        yield Store(MemoryRegistry(ttl_s), MemoryAcceptance(half_life_s))
        return
    async with connect(redis_url, timeout_s, tls) as client:
        await check(client, redis_url)
        yield Store(RedisRegistry(client, ttl_s), RedisAcceptance(client, half_life_s))
