"""The in-memory twin: the same contracts for a single process, no Redis anywhere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.state.acceptance import REQUEST_TTL_S, AcceptanceCounts, RequestState
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord

Clock = Callable[[], float]


@dataclass
class MemoryRegistry:
    ttl_s: float
    clock: Clock = time.monotonic
    _epoch: str = field(default_factory=lambda: uuid.uuid4().hex)
    _workers: dict[tuple[WorkerKind, str], tuple[float, RegisteredWorker]] = field(default_factory=dict)

    async def register(self, record: WorkerRecord) -> None:
        await self.heartbeat(record, {})

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        expiry = self.clock() + self.ttl_s
        self._workers[record.kind, record.worker_id] = expiry, RegisteredWorker(record, dict(load))

    async def deregister(self, record: WorkerRecord) -> None:
        self._workers.pop((record.kind, record.worker_id), None)

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        now = self.clock()
        self._workers = {key: entry for key, entry in self._workers.items() if entry[0] > now}
        live = [worker for key, (_, worker) in self._workers.items() if key[0] == kind]
        return sorted(live, key=lambda worker: worker.record.started_at)

    async def epoch(self) -> str:
        return self._epoch


@dataclass
class MemoryAcceptance:
    half_life_s: float
    clock: Clock = time.monotonic
    _requests: dict[str, tuple[float, RequestState]] = field(default_factory=dict)
    _totals: dict[tuple[str, str], tuple[float, AcceptanceCounts]] = field(default_factory=dict)

    async def save_requests(self, states: Iterable[RequestState], finished: Iterable[str] = ()) -> None:
        now = self.clock()
        for state in states:
            self._requests.pop(state.request_id, None)  # so that the order is that of expiry
            self._requests[state.request_id] = now + REQUEST_TTL_S, state
        for request_id in finished:
            self._requests.pop(request_id, None)
        self._forget_expired(now)

    async def save_request(self, state: RequestState) -> None:
        await self.save_requests([state])

    async def load_request(self, request_id: str) -> RequestState | None:
        self._forget_expired(self.clock())
        entry = self._requests.get(request_id)
        return entry[1] if entry else None

    async def delete_request(self, request_id: str) -> None:
        await self.save_requests([], [request_id])

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        now = self.clock()
        since, totals = self._totals.get((model, speculator), (now, AcceptanceCounts()))
        faded = totals * 0.5 ** ((now - since) / self.half_life_s)
        self._totals[model, speculator] = now, faded + counts

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        return self._totals.get((model, speculator), (0.0, AcceptanceCounts()))[1]

    def _forget_expired(self, now: float) -> None:
        while self._requests:
            oldest = next(iter(self._requests))
            if self._requests[oldest][0] > now:
                break
            del self._requests[oldest]
