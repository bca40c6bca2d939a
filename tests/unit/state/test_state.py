"""Shared state: Redis and the memory of one process keep one contract. And the embedded Redis."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from paceline.core.policy.calibration import Calibration
from paceline.messages import SpeculationStats
from paceline.state import (
    AcceptanceCounts,
    Append,
    RecordLimits,
    StateError,
    StateStore,
    WorkerRecord,
    open_store,
)
from paceline.state.acceptance import REQUEST_TTL_S
from paceline.state.acceptance_recorder import MAX_PENDING_REQUESTS
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.memory_state import open_state
from tests.helpers.waiting import eventually

ONE = AcceptanceCounts(1, (1,), (1,))
OLD = WorkerRecord("draft", "old", "127.0.0.1:4000", "family/draft", "draft_model", "abc", 1.0)
YOUNG = dataclasses.replace(OLD, worker_id="young", started_at=2.0)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
        await client.flushall()


@pytest.fixture
async def redis_store(redis_url: str, redis: Redis) -> AsyncIterator[StateStore]:
    """Its totals decay too slowly to matter."""
    async with open_store(redis_url, ttl_s=0.3, half_life_s=1e9) as store:
        yield store


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_store: StateStore) -> AsyncIterator[StateStore]:
    async with open_state(ttl_s=0.3) as in_memory:
        yield in_memory if request.param == "memory" else redis_store


async def ids(store: StateStore) -> list[str]:
    return [worker.record.worker_id for worker in await store.registry.workers("draft")]


async def test_workers_of_a_kind_are_listed_oldest_first(store: StateStore) -> None:
    target = dataclasses.replace(OLD, kind="target", numerics="native avx2; float32")
    for record in (YOUNG, target, OLD):
        await store.registry.register(record)
    assert await ids(store) == ["old", "young"]
    assert [worker.record for worker in await store.registry.workers("target")] == [target]
    assert await store.registry.epoch() == await store.registry.epoch() != ""


async def test_a_worker_leaves_by_itself_or_expires_without_heartbeats(store: StateStore) -> None:
    await store.registry.deregister(OLD)
    await store.registry.register(OLD)
    await store.registry.deregister(OLD)
    assert await ids(store) == []
    await store.registry.register(OLD)
    assert await ids(store) == ["old"]

    async def only_the_beating_worker_is_left() -> bool:
        await store.registry.heartbeat(YOUNG, {})
        return await ids(store) == ["young"]

    await eventually(only_the_beating_worker_is_left)


async def test_records_of_other_versions_are_read_or_skipped(redis_store: StateStore, redis: Redis) -> None:
    """An older worker has no `numerics`; a record that cannot be read hides no other."""
    older = dataclasses.asdict(OLD)
    del older["numerics"]
    for worker_id, value in {"old": {"record": older, "load": {}}, "from the future": {"record": 3}}.items():
        await redis.sadd("paceline:workers:draft", worker_id)
        await redis.set(f"paceline:worker:draft:{worker_id}", json.dumps(value))
    assert [worker.record for worker in await redis_store.registry.workers("draft")] == [OLD]


async def test_a_worker_is_known_while_its_registration_lasts(store: StateStore) -> None:
    load = {"running": 0.0}
    async with store.watcher("draft", interval_s=0.02) as watcher:
        async with store.registration(OLD, lambda: load):
            (worker,) = await watcher.wait_for(lambda workers: len(workers) == 1)
            assert worker.record == OLD
            load["running"] = 5.0
            (before,) = await watcher.wait_for(lambda workers: workers[0].load["running"] == 5.0)
            (after,) = await watcher.wait_for(lambda workers: workers[0].load != before.load)
            assert after.load == {"running": 5.0, "beat": before.load["beat"] + 1}, "each heartbeat has a number"
        assert await ids(store) == []
        # The first refresh found a new epoch, so this worker is dropped only after one TTL.
        assert await watcher.wait_for(lambda workers: not workers) == []


async def test_heartbeats_outlive_the_ttl_and_an_error_of_load(store: StateStore) -> None:
    beats = 0

    def load() -> Mapping[str, float]:
        nonlocal beats
        beats += 1
        if beats == 2:
            raise RuntimeError("the engine is being rebuilt")
        return {}

    async def eight_beats() -> bool:  # three per TTL
        return beats >= 8

    async with store.registration(OLD, load):
        await eventually(eight_beats)
        assert await ids(store) == ["old"]


async def test_counts_of_a_pair_add_up(store: StateStore) -> None:
    """Every calibration cell is stored at its place, and pairs are kept apart whatever their names."""
    cells = [i + 0.5 for i in range(Calibration.CELLS)], [i / 4 for i in range(Calibration.CELLS)]
    await store.acceptance.record("a:b", "c", AcceptanceCounts(5, (2, 2), (2, 1), *cells))
    await store.acceptance.record("a:b", "c", AcceptanceCounts(3, (1, 1, 1), (1, 0, 0)))
    await store.acceptance.record("a", "b:c", ONE)
    totals = await store.acceptance.acceptance("a:b", "c")
    assert totals.drafted == pytest.approx(8)
    assert totals.drafted_by_depth == pytest.approx((3, 3, 1))
    assert totals.accepted_by_depth == pytest.approx((3, 1, 0))
    assert totals.cell_drafted == pytest.approx(cells[0])
    assert totals.cell_accepted == pytest.approx(cells[1])
    assert (await store.acceptance.acceptance("a", "b:c")).drafted == 1
    assert await store.acceptance.acceptance("never", "seen") == AcceptanceCounts()


async def test_simultaneous_records_lose_nothing(store: StateStore) -> None:
    await asyncio.gather(*(store.acceptance.record("m", "ngram", ONE) for _ in range(100)))
    assert (await store.acceptance.acceptance("m", "ngram")).accepted == pytest.approx(100)


async def test_totals_in_redis_decay_and_rates_do_not(redis_url: str, redis: Redis) -> None:
    async with open_store(redis_url, half_life_s=0.05) as store:
        await store.acceptance.record("m", "ngram", AcceptanceCounts(10, (10,), (8,)))

        async def decayed() -> bool:
            await store.acceptance.record("m", "ngram", AcceptanceCounts())
            return (await store.acceptance.acceptance("m", "ngram")).drafted < 2.5

        await eventually(decayed)
        assert (await store.acceptance.acceptance("m", "ngram")).rates() == pytest.approx([0.8])


@pytest.mark.parametrize(
    "fields",
    [{"bin_drafted:0": "7", "bin_accepted:0": "5"}, {"cell_drafted:1": "2"}, {"drafted": "many"}],
    ids=["fields of an older version", "a gap", "no number"],
)
async def test_acceptance_that_cannot_be_read_is_learned_again(
    fields: dict[str, str], redis_store: StateStore, redis: Redis
) -> None:
    """Targets read it when they start: what another version wrote must not stop them."""
    await redis.hset("paceline:acceptance:m:ngram", mapping=fields)  # type: ignore[misc]
    assert await redis_store.acceptance.acceptance("m", "ngram") == AcceptanceCounts()


@pytest.mark.parametrize(
    ("steps", "rates"),
    [
        ([(2, 2, accepted) for accepted in (0, 1, 2, 2, 2)], [4 / 5, 3 / 4]),
        ([(1, 1, 1), (1, 1, 1), (2, 2, 2)], [1, 1]),
        ([], []),
    ],
    ids=["conditional on all earlier positions", "of trees that were deep enough", "no steps"],
)
def test_rates_of_positions(steps: list[tuple[int, int, int]], rates: list[float]) -> None:
    stats = SpeculationStats()
    for step in steps:
        stats.record(*step)
    counts = AcceptanceCounts.of(stats)
    assert counts.rates() == rates
    assert counts.acceptance_length == stats.acceptance_length


async def test_a_recorder_writes_what_runs_and_what_has_ended(redis_store: StateStore, redis: Redis) -> None:
    """Under each of its keys, for a while. A request is asked once, however many keys it has."""
    store, states = redis_store.acceptance, iter("12")
    async with redis_store.recorder(interval_s=3600) as recorder:
        with recorder.reporting([("a:b", "r"), ("a:b", "x:y")], lambda: next(states)):
            await recorder.run_once()
            assert await store.request(("a:b", "r")) == "1"
            assert await store.request(("a:b", "x:y")) == "1"
        for key in (("a:b", "r"), ("a:b", "x:y")):
            assert await recorder.request(key) == "2", "it is not written yet"
        assert await recorder.request(("a", "b:r")) is None
        for _ in range(3):
            recorder.count("m", "ngram", ONE)
    assert await store.request(("a:b", "x:y")) == "2"
    assert REQUEST_TTL_S - 60 < await redis.ttl("paceline:request:a%3Ab:r") <= REQUEST_TTL_S
    assert (await store.acceptance("m", "ngram")).drafted == pytest.approx(3)


async def test_a_request_of_which_nothing_is_known_does_not_replace_what_is(redis_store: StateStore) -> None:
    """As when a stream that has ended is read again."""
    key = ("a", "r")
    async with redis_store.recorder(interval_s=3600) as recorder:
        with recorder.reporting([key], lambda: "first"):
            pass
        await recorder.run_once()
        with recorder.reporting([key], lambda: None):
            assert await recorder.request(key) == "first"
            await recorder.run_once()
    assert await redis_store.acceptance.request(key) == "first"


async def test_of_two_requests_with_one_key_the_later_one_is_reported(redis_store: StateStore) -> None:
    key = ("a", "r")
    async with redis_store.recorder(interval_s=3600) as recorder:
        first = recorder.reporting([key], lambda: "first")
        first.__enter__()
        with recorder.reporting([key], lambda: "second"):
            first.__exit__(None, None, None)
            assert await recorder.request(key) == "second"
    assert await redis_store.acceptance.request(key) == "second"


async def test_a_report_is_known_while_it_is_written(redis_store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what replaces it meanwhile is written later."""
    key, write = ("a", "r"), redis_store.acceptance.save_requests
    async with redis_store.recorder(interval_s=3600) as recorder:

        async def slow(reports: Mapping[tuple[str, str], str]) -> None:
            assert await recorder.request(key) == reports[key]
            await write(reports)
            with recorder.reporting([key], lambda: "second"):
                pass

        with recorder.reporting([key], lambda: "first"):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(redis_store.acceptance, "save_requests", slow)
            await recorder.run_once()
        assert await recorder.request(key) == "second"
    assert await redis_store.acceptance.request(key) == "second"


async def test_a_recorder_writes_in_the_background(store: StateStore) -> None:
    """Nothing that is counted during a write is lost, or counted twice."""
    async with store.recorder(interval_s=0.001) as recorder:
        for _ in range(200):
            for _ in range(10):
                recorder.count("m", "ngram", ONE)
            await asyncio.sleep(0)

        async def written() -> bool:
            return (await store.acceptance.acceptance("m", "ngram")).drafted == pytest.approx(2000)

        await eventually(written)


async def test_a_recorder_drops_the_oldest_of_too_many_requests(redis_store: StateStore, redis: Redis) -> None:
    async with redis_store.recorder(interval_s=3600) as recorder:
        for number in range(MAX_PENDING_REQUESTS + 1):
            with recorder.reporting([("", str(number))], str):
                pass
    assert not await redis.exists("paceline:request::0")
    assert await redis.exists("paceline:request::1")


class Opener:
    """Opens a store of records with limits: in memory, or in Redis."""

    def __init__(self, url: str | None) -> None:
        self._url = url

    def __call__(self, ttl_s: float = 60.0, max_bytes: int = 100) -> AbstractAsyncContextManager[StateStore]:
        return open_state(self._url, records=RecordLimits(ttl_s, ttl_s, max_bytes))


@pytest.fixture(params=["memory", "redis"])
def keeping(request: pytest.FixtureRequest, redis_url: str, redis: Redis) -> Opener:
    return Opener(None if request.param == "memory" else redis_url)


async def test_a_client_has_its_own_responses_only(keeping: Opener) -> None:
    """Whatever the names: `a:b` is another client than `a`, and no client is one, too."""
    clients = ["", "a", "a:b"]
    async with keeping() as store:
        records = store.records
        for client in clients:
            await records.save(client, "b:1", f"record of {client}")
            await records.save(client, "b:1", f"newer record of {client}")
        assert [await records.load(client, "b:1") for client in clients] == [[f"newer record of {c}"] for c in clients]
        assert await records.load("a", "1") == await records.load("a:b", "1") == []
        assert await records.delete("a", "b:1")
        assert not await records.delete("a", "b:1")
        assert [await records.load(client, "b:1") == [] for client in clients] == [False, True, False]


async def test_responses_expire_and_their_bytes_are_free_again(keeping: Opener) -> None:
    async with keeping(ttl_s=0.2) as store:
        await store.records.save("a", "old", "x" * 40)

        async def expired() -> bool:
            return await store.records.load("a", "old") == []

        await eventually(expired)
        assert not await store.records.delete("a", "old")
        await store.records.save("b", "1", "x" * 50)
        await store.records.save("b", "2", "x" * 50)
        assert await store.records.load("b", "1"), "`a` has nothing left that counts"


async def test_the_client_with_the_most_bytes_loses_its_oldest_responses(keeping: Opener) -> None:
    """Bytes of UTF-8, not characters. What was deleted or replaced does not count."""
    async with keeping() as store:
        records = store.records

        async def kept() -> list[str]:
            named = [("modest", "1"), *(("greedy", str(number)) for number in range(5))]
            return [f"{client} {id_}" for client, id_ in named if await records.load(client, id_)]

        await records.save("modest", "1", "x" * 30)
        for number in range(4):
            await records.save("greedy", str(number), "é" * 10)
        assert await kept() == ["modest 1", "greedy 1", "greedy 2", "greedy 3"]
        await records.delete("greedy", "2")
        await records.save("greedy", "3", "y" * 20)
        await records.save("greedy", "4", "x" * 20)
        assert await kept() == ["modest 1", "greedy 1", "greedy 3", "greedy 4"]
        await records.save("modest", "2", "x" * 101)
        assert await records.load("modest", "2") == [], "no store keeps more than its limit"
        assert await kept() == ["greedy 1", "greedy 3", "greedy 4"]


async def test_the_books_of_responses_are_empty_when_the_responses_are(redis_url: str, redis: Redis) -> None:
    async with Opener(redis_url)() as store:
        for number in range(20):
            await store.records.save("a", str(number), "x" * 30)
        assert await redis.hgetall("paceline:record_bytes") == {"a": "90"}  # type: ignore[misc]
        assert await redis.zcard("paceline:records:a") == 3
        for number in range(17, 20):
            await store.records.delete("a", str(number))
        assert await redis.keys() == []


async def test_of_two_writers_one_finds_out_that_the_other_is_there(keeping: Opener) -> None:
    """An append is repeated when its answer was lost: it succeeds, and the entry is there once."""
    async with keeping(max_bytes=1000) as store:

        async def append(position: int, *entries: str) -> int:
            [length] = await store.records.append([Append("a", "r", position, entries)])
            return length

        assert await append(3, "late") == 0, "there is no journal"
        assert await append(0, "request", "1") == 2
        assert await append(2, "mine") == 3
        assert await append(2, "yours") == -3
        assert await append(3, "yours") == 4
        assert await store.records.load("a", "r", 1) == ["1", "mine", "yours"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://user:secret@127.0.0.1:1/0", "does not answer.*--redis-url"),
        ("http://x", "--redis-url http://x is no Redis URL"),
    ],
    ids=["unreachable", "malformed"],
)
async def test_a_redis_that_cannot_be_used_is_an_error_without_secrets(url: str, message: str) -> None:
    with pytest.raises(StateError, match=message) as raised:
        async with open_store(url):
            pass
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def test_an_embedded_redis_listens_on_loopback_only_and_keeps_nothing() -> None:
    with EmbeddedRedis() as redis, BlockingRedis.from_url(redis.url) as client:
        for name, value in {"bind": "127.0.0.1", "save": "", "appendonly": "no"}.items():
            assert client.config_get(name) == {name: value}
        url, pid = redis.url, redis.pid
        redis.start()
        assert redis.pid == pid, "a second start changes nothing"
        redis.kill()
        assert not redis.running
        redis.start()
        assert redis.url == url
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(url)))


def test_an_embedded_redis_needs_a_port_of_its_own(redis_url: str) -> None:
    with pytest.raises(StateError, match="not started"):
        _ = EmbeddedRedis().url
    mine = EmbeddedRedis(port_of(redis_url))
    with pytest.raises(StateError), mine:
        pass
    assert not mine.running
    with BlockingRedis.from_url(redis_url) as client:
        assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_an_embedded_redis_ends_with_its_parent_even_if_the_parent_is_killed() -> None:
    code = (
        "import sys; from paceline.state.embedded_redis import EmbeddedRedis; redis = EmbeddedRedis(); redis.start();"
        "print(redis.url, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        with socket.create_connection(("127.0.0.1", port_of(url))) as link:
            link.sendall(b"PING\r\n")
            assert link.recv(16) == b"+PONG\r\n", "else the server's end could be reset before it is accepted"
            os.kill(parent.pid, signal.SIGKILL)
            assert link.recv(1) == b""  # the server's end of the connection closes only with the server


async def test_a_repeated_append_is_there_once(redis_url: str, redis: Redis) -> None:
    """redis-py repeats a call whose answer did not come."""
    async with Opener(redis_url)() as store:
        begin, entry = Append("a", "r", 0, ["request"]), Append("a", "r", 1, ["1", "2"])
        assert await store.records.append([begin, entry, begin, entry]) == [1, 3, 1, 3]
        assert await store.records.load("a", "r") == ["request", "1", "2"]
