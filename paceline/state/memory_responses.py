"""Finished responses in the memory of one process."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from paceline.state.response_store import ResponseLimits


class MemoryResponses:
    """A `ResponseStore`."""

    def __init__(self, limits: ResponseLimits) -> None:
        self._limits = limits
        self._kept: defaultdict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
        """By client and id, oldest first: the expiry, on the monotonic clock, and the record."""
        self._bytes: Counter[str] = Counter()

    async def save(self, client: str, response_id: str, record: str) -> None:
        self._forget(client, response_id)
        self._kept[client][response_id] = time.monotonic() + self._limits.ttl_s, record
        self._bytes[client] += len(record.encode())
        if self._bytes.total() > self._limits.max_bytes:
            self._forget_expired()
        while self._bytes.total() > self._limits.max_bytes:
            [(largest, _)] = self._bytes.most_common(1)
            self._forget(largest, next(iter(self._kept[largest])))

    async def load(self, client: str, response_id: str) -> str | None:
        expiry, record = self._kept[client].get(response_id, (0.0, ""))
        return record if expiry > time.monotonic() else None

    async def delete(self, client: str, response_id: str) -> bool:
        known = await self.load(client, response_id) is not None
        self._forget(client, response_id)
        return known

    def _forget(self, client: str, response_id: str) -> None:
        _, record = self._kept[client].pop(response_id, (0.0, ""))
        self._bytes[client] -= len(record.encode())

    def _forget_expired(self) -> None:
        now = time.monotonic()
        for client, kept in self._kept.items():
            for response_id in [id_ for id_, (expiry, _) in kept.items() if expiry <= now]:
                self._forget(client, response_id)
