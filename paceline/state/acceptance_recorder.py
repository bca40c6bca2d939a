"""Writes acceptance to the store in the background."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore, RequestKey
from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability

MAX_PENDING_REQUESTS = 4096
"""Ended requests that wait to be written; beyond that the oldest one is dropped."""


class AcceptanceRecorder(PeriodicTask):
    """Writes every `interval_s` seconds while the context lasts, and once at its end.

    `reporting` and `count` only store values in memory. While Redis is unavailable they wait there: the last reports of
    ended requests, at most `MAX_PENDING_REQUESTS` of them, and the sum of the counts.
    """

    def __init__(self, acceptance: AcceptanceStore, presence: RedisAvailability, interval_s: float) -> None:
        self.interval_s = interval_s
        self._acceptance = acceptance
        self._presence = presence
        self._running: dict[RequestKey, Callable[[], str]] = {}
        self._ended: dict[RequestKey, str] = {}
        self._counts: dict[tuple[str, str], AcceptanceCounts] = {}

    @contextmanager
    def reporting(self, keys: Collection[RequestKey], report: Callable[[], str]) -> Iterator[None]:
        """Write what `report` returns of a request, under each of its keys, while the context lasts and at its end."""
        self._running |= dict.fromkeys(keys, report)
        try:
            yield
        finally:
            for key in keys:
                self._running.pop(key, None)
            self._enqueue(dict.fromkeys(keys, report()))

    async def request(self, key: RequestKey) -> str | None:
        """What is known of a request, here or in the store. Raises `StateUnavailableError`."""
        if (report := self._running.get(key)) is not None:
            return report()
        return self._ended.get(key) or await self._acceptance.request(key)

    def count(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Add to the totals of (model, speculator)."""
        pair = (model, speculator)
        self._counts[pair] = self._counts.get(pair, AcceptanceCounts()) + counts

    async def run_once(self) -> None:
        """Write now."""
        ended, self._ended = self._ended, {}
        reports = ended | {key: report() for key, report in self._running.items()}
        if reports and not await self._presence.attempt(self._acceptance.save_requests(reports)):
            newer, self._ended = self._ended, ended
            self._enqueue(newer)
        sums, self._counts = self._counts, {}
        for (model, speculator), counts in sums.items():
            if not await self._presence.attempt(self._acceptance.record(model, speculator, counts)):
                self.count(model, speculator, counts)

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self.run_once()

    def _enqueue(self, ended: dict[RequestKey, str]) -> None:
        self._ended.update(ended)
        while len(self._ended) > MAX_PENDING_REQUESTS:
            del self._ended[next(iter(self._ended))]
