"""Redis goes away, hangs, is wiped, is full: background work goes on, and catches up when Redis is back."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from paceline.state import (
    AcceptanceCounts,
    RequestAcceptance,
    StateStore,
    StateUnavailableError,
    WorkerRecord,
    open_store,
)
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.waiting import eventually

TTL_S = 0.6
INTERVAL_S = 0.02
WORKER = WorkerRecord("draft", "a", "127.0.0.1:4000", "", "ngram", "", 1.0)
REQUEST = RequestAcceptance("r", "m", "ngram")


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as redis:
        yield redis


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[StateStore]:
    async with open_store(redis.url, ttl_s=TTL_S, half_life_s=1e9, timeout_s=0.2) as store:
        yield store


async def saved(redis: EmbeddedRedis) -> bool:
    async with Redis.from_url(redis.url) as client:
        return bool(await client.exists("paceline:request:r"))


async def lost(store: StateStore) -> bool:
    return store.presence.unavailable


async def back(store: StateStore) -> bool:
    return not store.presence.unavailable


async def test_workers_remain_known_and_register_again(redis: EmbeddedRedis, store: StateStore) -> None:
    async with store.watcher("draft", INTERVAL_S) as watcher, store.registration(WORKER):
        await watcher.wait_for(lambda workers: len(workers) == 1)
        redis.kill()
        await eventually(lambda: lost(store))
        with pytest.raises(StateUnavailableError):
            await store.registry.workers("draft")
        redis.start()

        async def listed_again() -> bool:
            assert [worker.record for worker in watcher.workers] == [WORKER]
            return not store.presence.unavailable and len(await store.registry.workers("draft")) == 1

        await eventually(listed_again)


async def test_a_worker_that_died_during_the_outage_is_dropped_after_it(
    redis: EmbeddedRedis, store: StateStore
) -> None:
    async with store.watcher("draft", INTERVAL_S) as watcher:
        async with AsyncExitStack() as other:
            await other.enter_async_context(store.registration(WORKER))
            await watcher.wait_for(lambda workers: len(workers) == 1)
            redis.kill()
            await eventually(lambda: lost(store))
        assert len(watcher.workers) == 1
        redis.start()
        await watcher.wait_for(lambda workers: not workers)


async def test_a_wiped_memory_does_not_make_workers_vanish(redis: EmbeddedRedis, store: StateStore) -> None:
    """Only the new epoch shows a restart between two refreshes."""
    async with store.registration(WORKER), store.watcher("draft", interval_s=3600) as watcher:
        watcher._grace_until = 0.0  # the grace period of the first refresh is over
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        await watcher.run_once()
        assert len(watcher.workers) == 1


async def test_a_redis_out_of_reach_for_long_does_not_make_workers_vanish(
    redis: EmbeddedRedis, store: StateStore
) -> None:
    """Its memory survives, but the workers have expired in it."""
    assert redis.pid is not None
    await store.registry.register(WORKER)
    async with store.watcher("draft", interval_s=3600) as watcher:
        watcher._grace_until = 0.0  # the grace period of the first refresh is over
        os.kill(redis.pid, signal.SIGSTOP)
        await watcher.run_once()
        assert store.presence.unavailable
        os.kill(redis.pid, signal.SIGCONT)
        await store.registry.deregister(WORKER)
        await watcher.run_once()
        assert len(watcher.workers) == 1


async def test_records_wait_for_the_return(redis: EmbeddedRedis, store: StateStore) -> None:
    async with store.recorder(INTERVAL_S) as recorder:
        redis.kill()
        recorder.save(REQUEST)
        recorder.count("m", "ngram", AcceptanceCounts(2, (2,), (1,)))
        await eventually(lambda: lost(store))
        recorder.count("m", "ngram", AcceptanceCounts(3, (3,), (2,)))
        redis.start()

        async def written() -> bool:
            return not store.presence.unavailable and (await store.acceptance.acceptance("m", "ngram")).drafted > 4.9

        await eventually(written)
        await eventually(lambda: saved(redis))
        assert (await store.acceptance.acceptance("m", "ngram")).accepted == pytest.approx(3)


async def test_loss_and_return_are_one_log_line_each(
    redis: EmbeddedRedis, store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline.state")
    async with AsyncExitStack() as background:
        for part in (store.registration(WORKER), store.watcher("draft", INTERVAL_S)):
            await background.enter_async_context(part)
        recorder = await background.enter_async_context(store.recorder(INTERVAL_S))
        redis.kill()
        await eventually(lambda: lost(store))
        for _ in range(3):
            recorder.save(REQUEST)
            await recorder.run_once()
        redis.start()
        await eventually(lambda: back(store))
    assert [record.getMessage() for record in caplog.records] == [
        "Redis is away, serving continues without it",
        "Redis is back",
    ]


async def test_a_service_can_register_before_redis_returns(redis: EmbeddedRedis, store: StateStore) -> None:
    redis.kill()
    async with store.registration(WORKER), store.watcher("draft", INTERVAL_S) as watcher:
        assert store.presence.unavailable
        redis.start()
        await watcher.wait_for(lambda workers: len(workers) == 1)


async def test_a_redis_that_hangs_counts_as_unavailable(redis: EmbeddedRedis, store: StateStore) -> None:
    assert redis.pid is not None
    async with store.recorder(INTERVAL_S) as recorder:
        os.kill(redis.pid, signal.SIGSTOP)
        recorder.save(REQUEST)
        await eventually(lambda: lost(store))
        os.kill(redis.pid, signal.SIGCONT)
        await eventually(lambda: back(store))
        await eventually(lambda: saved(redis))


async def test_a_full_redis_counts_as_unavailable(redis: EmbeddedRedis, store: StateStore) -> None:
    async with Redis.from_url(redis.url) as client, store.recorder(INTERVAL_S) as recorder:
        await client.config_set("maxmemory", 1)
        recorder.save(REQUEST)
        await eventually(lambda: lost(store))
        await client.config_set("maxmemory", 0)
        await eventually(lambda: back(store))
        await eventually(lambda: saved(redis))


async def test_background_work_can_be_left_at_any_moment(store: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled call once looked like a lost connection to redis-py: the task ran on, and the exit never ended."""
    async with asyncio.timeout(20):
        for turns in range(100):
            async with store.watcher("draft", interval_s=0.0):
                for _ in range(turns % 20):
                    await asyncio.sleep(0)
    assert not caplog.records
