"""Keeps a target in touch with every draft worker in the registry, before a request names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from paceline.state import RegisteredWorker, StateStore, WorkerWatcher
from paceline.wire.draft_pool import DraftPool
from paceline.wire.session_messages import ConnectDrafts


@asynccontextmanager
async def draft_discovery(pool: DraftPool, store: StateStore) -> AsyncIterator[None]:
    """Reach for every worker that appears, for as long as the context lasts; then end all links."""
    async with store.watcher("draft") as workers:
        following = asyncio.create_task(_connect_registered(workers, pool), name="follow the drafts")
        try:
            yield
        finally:
            following.cancel()
            await pool.stop()


async def _connect_registered(workers: WorkerWatcher, pool: DraftPool) -> None:
    known: set[str] = set()

    def news(registered: Sequence[RegisteredWorker]) -> bool:
        return known != {worker.record.address for worker in registered}

    while True:
        known = {worker.record.address for worker in await workers.wait_for(news)}
        pool.connect(ConnectDrafts(tuple(known)))
