"""Who is there: the workers of a deployment, each kept alive by its own heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

WorkerKind = Literal["target", "draft", "gateway"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says about itself once, when it starts.

    `address` is host:port as others reach it. `model` and `method` are empty where they mean nothing (a
    gateway has no model). `fingerprint` is the vocabulary's: workers whose fingerprints differ never work
    together; empty for workers that know only ids. `started_at`: seconds since the epoch. `numerics`: what a target's
    numbers depend on; empty for other workers, and for those of versions that do not say.
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
    """A worker and its load as of the last heartbeat (names are the worker's own, such as `running`)."""

    record: WorkerRecord
    load: Mapping[str, float]


class WorkerRegistry(Protocol):
    """The workers heard of within the last `ttl_s` seconds. Every call may raise `StateUnavailableError`."""

    ttl_s: float

    async def register(self, record: WorkerRecord) -> None:
        """Announce a worker; it vanishes `ttl_s` seconds after its last heartbeat."""

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        """Renew a worker. Also announces it, so a registry that forgot everything learns it all again."""

    async def deregister(self, record: WorkerRecord) -> None:
        """Remove a worker at once. Unknown workers are ignored."""

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        """The live workers of a kind, oldest first."""

    async def epoch(self) -> str:
        """Names this registry's memory. Another value than before: it was wiped; workers are coming back."""
