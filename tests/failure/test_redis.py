"""Redis goes away, hangs, is wiped, is full: background work goes on, and catches up when Redis is back."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from paceline.state import AcceptanceCounts, RequestState, StateStore, StateUnavailableError, WorkerRecord, open_store
from paceline.state.embedded_redis import EmbeddedRedis

TTL_S = 0.6
INTERVAL_S = 0.02
WORKER = WorkerRecord("draft", "a", "127.0.0.1:4000", "", "ngram", "", 1.0)
STATE = RequestState("r", "m", "ngram", seed=1, prompt_length=3, committed=(4, 5))


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as redis:
        yield redis


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[StateStore]:
    async with open_store(redis.url, ttl_s=TTL_S, half_life_s=1e9, timeout_s=0.2) as store:
        yield store


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def lost(store: StateStore) -> bool:
    return store.presence.unavailable


async def back(store: StateStore) -> bool:
    return not store.presence.unavailable


async def test_workers_stay_known_and_register_again(redis: EmbeddedRedis, store: StateStore) -> None:
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


async def test_a_worker_that_died_meanwhile_is_dropped_after_the_return(
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
    """A restart between two looks goes unnoticed but for the new epoch; once it emptied the watcher."""
    async with store.registration(WORKER), store.watcher("draft", interval_s=3600) as watcher:
        watcher._grace_until = 0.0  # the leniency of the first look is over
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        await watcher.run_once()
        assert len(watcher.workers) == 1


async def test_a_redis_out_of_reach_for_long_does_not_make_workers_vanish(
    redis: EmbeddedRedis, store: StateStore
) -> None:
    """Its memory is as it was, but the workers, cut off too, have expired in it."""
    assert redis.pid is not None
    await store.registry.register(WORKER)
    async with store.watcher("draft", interval_s=3600) as watcher:
        watcher._grace_until = 0.0  # the leniency of the first look is over
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
        recorder.save("r", lambda: STATE)
        recorder.count("m", "ngram", AcceptanceCounts(2, (2,), (1,)))
        await eventually(lambda: lost(store))
        recorder.count("m", "ngram", AcceptanceCounts(3, (3,), (2,)))
        redis.start()

        async def written() -> bool:
            return not store.presence.unavailable and (await store.acceptance.acceptance("m", "ngram")).drafted > 4.9

        await eventually(written)
        assert await store.acceptance.load_request("r") == STATE
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
            recorder.save("r", lambda: STATE)
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


async def test_a_redis_that_hangs_is_a_redis_that_is_away(redis: EmbeddedRedis, store: StateStore) -> None:
    assert redis.pid is not None
    async with store.recorder(INTERVAL_S) as recorder:
        os.kill(redis.pid, signal.SIGSTOP)
        recorder.save("r", lambda: STATE)
        await eventually(lambda: lost(store))
        os.kill(redis.pid, signal.SIGCONT)
        await eventually(lambda: back(store))
        assert await store.acceptance.load_request("r") == STATE


async def test_a_full_redis_disturbs_nobody(redis: EmbeddedRedis, store: StateStore) -> None:
    async with Redis.from_url(redis.url) as client, store.recorder(INTERVAL_S) as recorder:
        await client.config_set("maxmemory", 1)
        recorder.save("r", lambda: STATE)
        await eventually(lambda: lost(store))
        await client.config_set("maxmemory", 0)
        await eventually(lambda: back(store))
        assert await store.acceptance.load_request("r") == STATE


async def test_background_work_can_be_left_at_any_moment(store: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    """It used to be cancelled, which redis-py took for a lost connection; then it ran on, and leaving never ended."""
    async with asyncio.timeout(20):
        for turns in range(100):
            async with store.watcher("draft", interval_s=0.0):
                for _ in range(turns % 20):
                    await asyncio.sleep(0)
    assert not caplog.records
