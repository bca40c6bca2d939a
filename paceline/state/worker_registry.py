"""The registry of a deployment's workers. Each worker's own heartbeat keeps it listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

WorkerKind = Literal["target", "draft", "gateway"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's description of itself, fixed when it starts.

    `address`: host:port at which other services reach it. `model` and `method` are empty where they mean nothing (a
    gateway has no model). `fingerprint`: of the vocabulary; workers whose fingerprints differ never work together;
    empty for workers that know only token ids. `started_at`: seconds since the epoch. `numerics`: what a target's
    results depend on; empty for other workers, and for records of versions without this field.
    """

    kind: WorkerKind
    worker_id: str
    address: str
    model: str
    method: str
    fingerprint: str
    started_at: float
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """A worker and its load as of the last heartbeat. Each worker names its own load values, such as `running`."""

    record: WorkerRecord
    load: Mapping[str, float]


class WorkerRegistry(Protocol):
    """The workers with a heartbeat in the last `ttl_s` seconds. Every call may raise `StateUnavailableError`."""

    ttl_s: float

    async def register(self, record: WorkerRecord) -> None:
        """A heartbeat without load."""

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        """List a worker for another `ttl_s` seconds. An unknown worker is added."""

    async def deregister(self, record: WorkerRecord) -> None:
        """Remove a worker at once. Unknown workers are ignored."""

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        """The live workers of a kind, oldest first."""

    async def epoch(self) -> str:
        """A name of this registry's memory. A new value means that the memory was wiped and workers will return."""
