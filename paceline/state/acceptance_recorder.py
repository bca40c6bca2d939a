"""Writes acceptance to the store in the background."""

from __future__ import annotations

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore, RequestAcceptance
from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability

MAX_PENDING_REQUESTS = 4096
"""Requests whose acceptance waits to be written; beyond that the oldest entry is dropped."""


class AcceptanceRecorder(PeriodicTask):
    """Writes every `interval_s` seconds while the context lasts, and once at its end.

    `save`, `finish` and `count` only store values in memory. While Redis is unavailable they wait there: the newest
    value of each request, at most `MAX_PENDING_REQUESTS` of them, and the sum of the counts.
    """

    def __init__(self, acceptance: AcceptanceStore, presence: RedisAvailability, interval_s: float) -> None:
        self.interval_s = interval_s
        self._acceptance = acceptance
        self._presence = presence
        self._requests: dict[str, RequestAcceptance | None] = {}  # None: finished
        self._counts: dict[tuple[str, str], AcceptanceCounts] = {}

    def save(self, request: RequestAcceptance) -> None:
        """Write this acceptance of a running request."""
        self._enqueue({request.request_id: request})

    def finish(self, request_id: str) -> None:
        """Remove the request from the store."""
        self._enqueue({request_id: None})

    def count(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Add to the totals of (model, speculator)."""
        pair = (model, speculator)
        self._counts[pair] = self._counts.get(pair, AcceptanceCounts()) + counts

    async def run_once(self) -> None:
        """Write now."""
        requests, self._requests = self._requests, {}
        if requests and not await self._presence.attempt(self._acceptance.save_requests(requests)):
            newer, self._requests = self._requests, requests
            self._enqueue(newer)
        sums, self._counts = self._counts, {}
        for (model, speculator), counts in sums.items():
            if not await self._presence.attempt(self._acceptance.record(model, speculator, counts)):
                self.count(model, speculator, counts)

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self.run_once()

    def _enqueue(self, requests: dict[str, RequestAcceptance | None]) -> None:
        self._requests.update(requests)
        while len(self._requests) > MAX_PENDING_REQUESTS:
            del self._requests[next(iter(self._requests))]
