"""Connects a target to every draft worker in the registry, before a request names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from paceline.state import RegisteredWorker, StateStore, WorkerWatcher
from paceline.wire.draft_pool import DraftPool
from paceline.wire.draft_stream_messages import ConnectDrafts

RECONNECT_S = 5.0
"""A registered worker that the pool has given up is tried again after this time."""


@asynccontextmanager
async def draft_discovery(pool: DraftPool, store: StateStore) -> AsyncIterator[None]:
    """Connect to every worker that registers, for as long as the context lasts; then end all links."""
    async with store.watcher("draft") as workers:
        task = asyncio.create_task(_connect_registered(workers, pool), name="draft discovery")
        try:
            yield
        finally:
            task.cancel()
            await pool.stop()


async def _connect_registered(workers: WorkerWatcher, pool: DraftPool) -> None:
    known: set[str] = set()

    def has_changed(registered: Sequence[RegisteredWorker]) -> bool:
        return known != {worker.record.address for worker in registered}

    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S):
                known = {worker.record.address for worker in await workers.wait_for(has_changed)}
        pool.connect(ConnectDrafts(tuple(known)))
