"""Writes acceptance to the store in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore, RequestKey
from paceline.state.periodic_task import PeriodicTask
from paceline.state.redis_availability import RedisAvailability

MAX_PENDING_REQUESTS = 4096
"""Reports of ended requests that wait to be written, one for each key; beyond that the oldest one is dropped."""
AT_ONCE = 128
"""Reports that are made and written without a pause for other tasks."""
Report = Callable[[], str | None]
"""What is known of a request; None: nothing yet."""


class AcceptanceRecorder(PeriodicTask):
    """Writes every `interval_s` seconds while the context lasts, and once at its end.

    `reporting` and `count` only store values in memory. While Redis is unavailable they wait there: the last reports of
    ended requests, at most `MAX_PENDING_REQUESTS` of them, and the sum of the counts.
    """

    def __init__(self, acceptance: AcceptanceStore, presence: RedisAvailability, interval_s: float) -> None:
        self.interval_s = interval_s
        self._acceptance = acceptance
        self._presence = presence
        self._running: dict[RequestKey, Report] = {}
        self._ended: dict[RequestKey, str] = {}
        self._counts: dict[tuple[str, str], AcceptanceCounts] = {}

    @contextmanager
    def reporting(self, keys: Collection[RequestKey], report: Report) -> Iterator[None]:
        """Write what `report` returns of a request, under each of its keys, while the context lasts and at its end.

        Of two requests with the same key, the one that began last is reported.
        """
        self._running |= dict.fromkeys(keys, report)
        try:
            yield
        finally:
            own = [key for key in keys if self._running.get(key) == report]
            for key in own:
                del self._running[key]
            if (last := report()) is not None:
                self._enqueue(dict.fromkeys(own, last))

    async def request(self, key: RequestKey) -> str | None:
        """What is known of a request, here or in the store. Raises `StateUnavailableError`."""
        running = self._running.get(key)
        return (running and running()) or self._ended.get(key) or await self._acceptance.request(key)

    def count(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Add to the totals of (model, speculator)."""
        pair = (model, speculator)
        self._counts[pair] = self._counts.get(pair, AcceptanceCounts()) + counts

    async def run_once(self) -> None:
        """Write now."""
        await self._write_requests(self._ended.copy())
        await self._write_requests(self._running.copy())
        sums, self._counts = self._counts, {}
        for (model, speculator), counts in sums.items():
            if not await self._presence.attempt(self._acceptance.record(model, speculator, counts)):
                self.count(model, speculator, counts)

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self.run_once()

    async def _write_requests(self, reports: Mapping[RequestKey, str | Report]) -> None:
        """A report that was written does not wait any more."""
        made: dict[str | Report, str | None] = {}  # a request may have several keys
        keys = list(reports)
        for start in range(0, len(keys), AT_ONCE):
            some = {key: reports[key] for key in keys[start : start + AT_ONCE]}
            for each in some.values():
                if each not in made:
                    made[each] = each if isinstance(each, str) else each()
            texts = {key: text for key, each in some.items() if (text := made[each]) is not None}
            if texts and not await self._presence.attempt(self._acceptance.save_requests(texts)):
                return
            for key in [key for key, text in texts.items() if self._ended.get(key) == text]:
                del self._ended[key]
            await asyncio.sleep(0)

    def _enqueue(self, ended: dict[RequestKey, str]) -> None:
        self._ended.update(ended)
        while len(self._ended) > MAX_PENDING_REQUESTS:
            del self._ended[next(iter(self._ended))]
