"""Keeps a target in touch with every draft worker in the registry, before a request names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from paceline.state import Registered, Store, Watcher
from paceline.wire.draft_pool import DraftPool
from paceline.wire.sessions import Reach


@asynccontextmanager
async def reached(pool: DraftPool, store: Store) -> AsyncIterator[None]:
    """Reach for every worker that appears, for as long as the context lasts; then end all links."""
    async with store.watcher("draft") as workers:
        following = asyncio.create_task(_follow(workers, pool), name="follow the drafts")
        try:
            yield
        finally:
            following.cancel()
            await pool.stop()


async def _follow(workers: Watcher, pool: DraftPool) -> None:
    known: set[str] = set()

    def news(registered: Sequence[Registered]) -> bool:
        return known != {worker.record.address for worker in registered}

    while True:
        known = {worker.record.address for worker in await workers.until(news)}
        pool.reach(Reach(tuple(known)))
