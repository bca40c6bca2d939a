"""Acceptance on its way to the store: noted at every step, written in the background."""

from __future__ import annotations

from collections.abc import Callable

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore, RequestState
from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability

MAX_PENDING_REQUESTS = 4096
"""Requests whose state may wait to be written; beyond that the longest waiting is given up."""

Snapshot = Callable[[], RequestState]


class AcceptanceRecorder(PeriodicTask):
    """Writes what it was told every `interval_s` seconds, for as long as the context lasts.

    `save`, `finish` and `count` only take a note. While Redis is away the notes wait: one per request, and the sums of
    counts; their number is bounded.
    """

    def __init__(self, acceptance: AcceptanceStore, presence: RedisAvailability, interval_s: float) -> None:
        self.interval_s = interval_s
        self._acceptance = acceptance
        self._presence = presence
        self._requests: dict[str, Snapshot | None] = {}  # None: finished
        self._counts: dict[tuple[str, str], AcceptanceCounts] = {}

    def save(self, request_id: str, snapshot: Snapshot) -> None:
        """The request has come further. `snapshot` is called when it is time to write."""
        self._enqueue(request_id, snapshot)

    def finish(self, request_id: str) -> None:
        """The request has ended; its state can be forgotten."""
        self._enqueue(request_id, None)

    def count(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Add to the totals of (model, speculator)."""
        pair = (model, speculator)
        self._counts[pair] = self._counts.get(pair, AcceptanceCounts()) + counts

    async def run_once(self) -> None:
        """Write now."""
        await self._write_requests()
        await self._write_counts()

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self.run_once()

    def _enqueue(self, request_id: str, snapshot: Snapshot | None) -> None:
        self._requests.pop(request_id, None)  # so that the order is that of waiting
        self._requests[request_id] = snapshot
        if len(self._requests) > MAX_PENDING_REQUESTS:
            del self._requests[next(iter(self._requests))]

    async def _write_requests(self) -> None:
        notes, self._requests = self._requests, {}
        if not notes:
            return
        states = [snapshot() for snapshot in notes.values() if snapshot]
        finished = [request_id for request_id, snapshot in notes.items() if not snapshot]
        if not await self._presence.attempt(self._acceptance.save_requests(states, finished)):
            newer, self._requests = self._requests, notes
            for request_id, snapshot in newer.items():
                self._enqueue(request_id, snapshot)

    async def _write_counts(self) -> None:
        sums, self._counts = self._counts, {}
        for (model, speculator), counts in sums.items():
            if not await self._presence.attempt(self._acceptance.record(model, speculator, counts)):
                self.count(model, speculator, counts)
