"""Shared state in the memory of one process, for a deployment without Redis."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.state.acceptance import AcceptanceCounts, RequestKey
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord


@dataclass
class MemoryRegistry:
    """A `WorkerRegistry`."""

    ttl_s: float
    _epoch: str = field(default_factory=lambda: uuid.uuid4().hex)
    _workers: dict[tuple[WorkerKind, str], tuple[float, RegisteredWorker]] = field(default_factory=dict)
    """The expiry, on the monotonic clock, and the worker."""

    async def register(self, record: WorkerRecord) -> None:
        await self.heartbeat(record, {})

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        expiry = time.monotonic() + self.ttl_s
        self._workers[record.kind, record.worker_id] = expiry, RegisteredWorker(record, dict(load))

    async def deregister(self, record: WorkerRecord) -> None:
        self._workers.pop((record.kind, record.worker_id), None)

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        now = time.monotonic()
        self._workers = {key: entry for key, entry in self._workers.items() if entry[0] > now}
        live = [worker for key, (_, worker) in self._workers.items() if key[0] == kind]
        return sorted(live, key=lambda worker: worker.record.started_at)

    async def epoch(self) -> str:
        return self._epoch


class MemoryAcceptance:
    """An `AcceptanceStore`. It keeps totals only, and they do not decay: they live no longer than their process."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], AcceptanceCounts] = {}

    async def save_requests(self, reports: Mapping[RequestKey, str]) -> None:
        """Keep nothing: no other process could read it."""

    async def request(self, key: RequestKey) -> str | None:
        return None

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        self._totals[model, speculator] = await self.acceptance(model, speculator) + counts

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        return self._totals.get((model, speculator), AcceptanceCounts())
