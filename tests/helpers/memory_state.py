"""Shared state in this process instead of Redis, records included; tests/unit/state holds both to one contract."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from paceline.state import StateStore, open_store
from paceline.state.record_store import Append, RecordLimits


@asynccontextmanager
async def open_state(
    redis_url: str | None = None, *, ttl_s: float = 6.0, records: RecordLimits | None = None
) -> AsyncIterator[StateStore]:
    """`open_store`, but with records if there is no URL, too."""
    records = records or RecordLimits()
    async with open_store(redis_url, ttl_s=ttl_s, records=records) as store:
        yield store if redis_url else replace(store, kept_records=MemoryRecords(records))


@dataclass(slots=True)
class _Record:
    entries: list[str] = field(default_factory=list)
    expiry: float = 0.0
    """On the monotonic clock."""
    bytes: int = 0


class MemoryRecords:
    """A `RecordStore`."""

    def __init__(self, limits: RecordLimits) -> None:
        self._limits = limits
        self._kept: dict[tuple[str, str], _Record] = {}
        self._bytes: Counter[str] = Counter()
        """By client."""
        self._leases: dict[tuple[str, str], float] = {}

    async def save(self, client: str, record_id: str, entry: str) -> None:
        self._forget((client, record_id))
        self._extend((client, record_id), [entry], self._limits.response_s)
        self._forget_beyond_limit()

    async def append(self, appends: Sequence[Append]) -> list[int]:
        lengths = []
        for each in appends:
            key = each.client, each.record_id
            length = len(await self.load(*key))
            if length == each.position:
                self._extend(key, each.entries, self._limits.resumable_s)
                length += len(each.entries)
                if each.lease_s:
                    self._leases[key] = time.monotonic() + each.lease_s
                elif each.lease_s is not None:
                    self._leases.pop(key, None)
            else:
                length = -length
            lengths.append(length)
        self._forget_beyond_limit()
        return lengths

    async def load(self, client: str, record_id: str, start: int = 0) -> list[str]:
        record = self._kept.get((client, record_id))
        return record.entries[start:] if record is not None and record.expiry > time.monotonic() else []

    async def delete(self, client: str, record_id: str) -> bool:
        known = bool(await self.load(client, record_id))
        self._forget((client, record_id))
        self._leases.pop((client, record_id), None)
        return known

    async def unleased(self) -> list[tuple[str, str]]:
        now = time.monotonic()
        return [key for key, end in self._leases.items() if end <= now]

    def _extend(self, key: tuple[str, str], entries: Sequence[str], ttl_s: float) -> None:
        record, size = self._kept.setdefault(key, _Record()), sum(len(each.encode()) for each in entries)
        record.entries += entries
        record.bytes += size
        record.expiry = time.monotonic() + ttl_s
        self._bytes[key[0]] += size

    def _forget(self, key: tuple[str, str]) -> None:
        if (record := self._kept.pop(key, None)) is not None:
            self._bytes[key[0]] -= record.bytes

    def _forget_beyond_limit(self) -> None:
        """Expired records, then of the client that has the most bytes the one that expires first."""
        if self._bytes.total() > self._limits.max_bytes:
            now = time.monotonic()
            for key in [key for key, record in self._kept.items() if record.expiry <= now]:
                self._forget(key)
        while self._bytes.total() > self._limits.max_bytes:
            [(largest, _)] = self._bytes.most_common(1)
            self._forget(min((key for key in self._kept if key[0] == largest), key=lambda key: self._kept[key].expiry))
