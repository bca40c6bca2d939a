"""Redis goes away, hangs, is wiped, is full: background work goes on, and catches up when Redis is back."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from paceline.state import (
    AcceptanceCounts,
    StateStore,
    StateUnavailableError,
    WorkerRecord,
    open_store,
)
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.waiting import eventually

TTL_S = 0.5
INTERVAL_S = 0.02
WORKER = WorkerRecord("draft", "a", "127.0.0.1:4000", "", "ngram", "", 1.0)


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as redis:
        yield redis


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[StateStore]:
    async with open_store(redis.url, ttl_s=TTL_S, half_life_s=1e9, timeout_s=0.2) as store:
        yield store


@asynccontextmanager
async def killed(redis: EmbeddedRedis) -> AsyncIterator[None]:
    redis.kill()
    yield
    redis.start()


@asynccontextmanager
async def hanging(redis: EmbeddedRedis) -> AsyncIterator[None]:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    yield
    os.kill(redis.pid, signal.SIGCONT)


@asynccontextmanager
async def full(redis: EmbeddedRedis) -> AsyncIterator[None]:
    async with Redis.from_url(redis.url) as client:
        await client.config_set("maxmemory", 1)
        yield
        await client.config_set("maxmemory", 0)


@pytest.mark.parametrize("outage", [killed, hanging, full])
async def test_records_wait_for_the_return(
    outage: Callable[[EmbeddedRedis], AbstractAsyncContextManager[None]],
    redis: EmbeddedRedis,
    store: StateStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Loss and return are one log line each."""
    caplog.set_level(logging.INFO, "paceline.state")

    async def unavailable() -> bool:
        return store.presence.unavailable

    async def written() -> bool:
        if store.presence.unavailable:
            return False
        async with Redis.from_url(redis.url) as client:
            saved = await client.exists("paceline:request::r")
        return bool(saved) and (await store.acceptance.acceptance("m", "ngram")).drafted > 4.9

    async with store.recorder(INTERVAL_S) as recorder:
        async with outage(redis):
            with recorder.reporting([("", "r")], str):
                pass
            recorder.count("m", "ngram", AcceptanceCounts(2, (2,), (1,)))
            await eventually(unavailable)
            recorder.count("m", "ngram", AcceptanceCounts(3, (3,), (2,)))
            await recorder.run_once()
        await eventually(written)
        assert (await store.acceptance.acceptance("m", "ngram")).accepted == pytest.approx(3)
    assert [record.getMessage() for record in caplog.records] == [
        "Redis is away, serving continues without it",
        "Redis is back",
    ]


async def test_workers_remain_known_during_an_outage(redis: EmbeddedRedis, store: StateStore) -> None:
    """After it they register again, and what died during it is dropped. A service can register during it."""

    def known() -> set[str]:
        return {worker.record.worker_id for worker in watcher.workers}

    async def unavailable() -> bool:
        return store.presence.unavailable

    async def all_registered() -> bool:
        assert "a" in known()
        if store.presence.unavailable:
            return False
        listed = {worker.record.worker_id for worker in await store.registry.workers("draft")}
        return listed == known() == {"a", "late"}

    async with store.watcher("draft", INTERVAL_S) as watcher, store.registration(WORKER):
        async with store.registration(replace(WORKER, worker_id="dies")):
            await watcher.wait_for(lambda workers: len(workers) == 2)
            redis.kill()
            await eventually(unavailable)
            with pytest.raises(StateUnavailableError):
                await store.registry.workers("draft")
        assert known() == {"a", "dies"}
        async with store.registration(replace(WORKER, worker_id="late")):
            redis.start()
            await eventually(all_registered)


async def test_a_wiped_memory_does_not_make_workers_vanish(redis: EmbeddedRedis, store: StateStore) -> None:
    """Only the new epoch shows a restart between two refreshes."""
    async with store.registration(WORKER), store.watcher("draft", interval_s=3600) as watcher:
        await asyncio.sleep(TTL_S)  # the grace period of the first refresh is over
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        await watcher.run_once()
        assert len(watcher.workers) == 1


async def test_a_redis_out_of_reach_for_long_does_not_make_workers_vanish(
    redis: EmbeddedRedis, store: StateStore
) -> None:
    """Its memory survives, but the workers have expired in it."""
    await store.registry.register(WORKER)
    async with store.watcher("draft", interval_s=3600) as watcher:
        async with hanging(redis):
            await asyncio.sleep(TTL_S)
            await watcher.run_once()
            assert store.presence.unavailable
        assert not await store.registry.workers("draft")
        await watcher.run_once()
        assert len(watcher.workers) == 1


async def test_background_work_can_be_left_at_any_moment(store: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled call once looked like a lost connection to redis-py: the task ran on, and the exit never ended."""
    async with asyncio.timeout(20):
        for turns in range(100):
            async with store.watcher("draft", interval_s=0.0):
                for _ in range(turns % 20):
                    await asyncio.sleep(0)
    assert not caplog.records
