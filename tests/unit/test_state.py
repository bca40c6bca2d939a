"""Shared state: Redis and the memory of one process keep one contract."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from paceline.core.messages import SpeculationStats
from paceline.core.policy.calibration import Calibration
from paceline.state import AcceptanceCounts, RequestAcceptance, StateError, StateStore, WorkerRecord, open_store
from paceline.state.acceptance_recorder import MAX_PENDING_REQUESTS
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.waiting import eventually

TTL_S = 0.3


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
        await client.flushall()


@pytest.fixture(params=["memory", "redis"])
async def url(request: pytest.FixtureRequest, redis_url: str, redis: Redis) -> str | None:
    return redis_url if request.param == "redis" else None


@pytest.fixture
async def store(url: str | None) -> AsyncIterator[StateStore]:
    """Its totals decay too slowly to matter."""
    async with open_store(url, ttl_s=TTL_S, half_life_s=1e9) as store:
        yield store


@pytest.fixture
async def redis_store(redis_url: str) -> AsyncIterator[StateStore]:
    async with open_store(redis_url, half_life_s=1e9) as store:
        yield store


def draft(worker_id: str, started_at: float = 1.0) -> WorkerRecord:
    return WorkerRecord("draft", worker_id, "127.0.0.1:4000", "family/draft", "draft_model", "abc", started_at)


async def ids(store: StateStore) -> list[str]:
    return [worker.record.worker_id for worker in await store.registry.workers("draft")]


class TestRegistry:
    async def test_lists_the_workers_of_a_kind_oldest_first(self, store: StateStore) -> None:
        target = dataclasses.replace(draft("t"), kind="target", numerics="native avx2; float32")
        for record in (draft("young", 2.0), target, draft("old", 1.0)):
            await store.registry.register(record)
        assert await ids(store) == ["old", "young"]
        assert [worker.record for worker in await store.registry.workers("target")] == [target]

    async def test_a_heartbeat_updates_the_load_and_lists_an_unknown_worker(self, store: StateStore) -> None:
        await store.registry.heartbeat(draft("a"), {"running": 1})
        await store.registry.heartbeat(draft("a"), {"running": 2, "step_s": 0.25})
        (worker,) = await store.registry.workers("draft")
        assert worker.load == {"running": 2, "step_s": 0.25}

    async def test_a_worker_without_heartbeats_expires(self, store: StateStore) -> None:
        await store.registry.register(draft("silent"))
        assert await ids(store) == ["silent"]

        async def only_the_beating_worker_is_left() -> bool:
            await store.registry.heartbeat(draft("beating"), {})
            return await ids(store) == ["beating"]

        await eventually(only_the_beating_worker_is_left)

    async def test_a_worker_that_deregisters_is_gone_at_once(self, store: StateStore) -> None:
        await store.registry.register(draft("a"))
        await store.registry.deregister(draft("a"))
        await store.registry.deregister(draft("never seen"))
        assert await ids(store) == []

    async def test_the_epoch_lasts_as_long_as_the_memory(self, store: StateStore) -> None:
        assert await store.registry.epoch() == await store.registry.epoch() != ""

    async def test_reads_records_of_other_versions_or_skips_them(self, redis_store: StateStore, redis: Redis) -> None:
        """An older worker has no `numerics`; a record that cannot be read hides no other."""
        older = dataclasses.asdict(draft("old"))
        del older["numerics"]
        for worker_id, value in {"old": {"record": older, "load": {}}, "from the future": {"record": 3}}.items():
            await redis.sadd("paceline:workers:draft", worker_id)
            await redis.set(f"paceline:worker:draft:{worker_id}", json.dumps(value))
        assert [worker.record for worker in await redis_store.registry.workers("draft")] == [draft("old")]


class TestRegistrationAndWatcher:
    async def test_a_worker_is_known_while_its_registration_lasts(self, store: StateStore) -> None:
        load = {"running": 0.0}
        async with store.watcher("draft", interval_s=0.02) as watcher:
            async with store.registration(draft("a"), lambda: load):
                (worker,) = await watcher.wait_for(lambda workers: len(workers) == 1)
                assert worker.record == draft("a")
                load["running"] = 5.0
                (before,) = await watcher.wait_for(lambda workers: workers[0].load["running"] == 5.0)
                (after,) = await watcher.wait_for(lambda workers: workers[0].load != before.load)
                assert after.load == {"running": 5.0, "beat": before.load["beat"] + 1}, "each heartbeat has a number"
            assert await ids(store) == []
            # The first refresh found a new epoch, so this worker is dropped only after one TTL.
            assert await watcher.wait_for(lambda workers: not workers) == []

    async def test_heartbeats_outlive_the_ttl_and_an_error_of_load(self, store: StateStore) -> None:
        beats = 0

        def load() -> dict[str, float]:
            nonlocal beats
            beats += 1
            if beats == 2:
                raise RuntimeError("the engine is being rebuilt")
            return {}

        async def eight_beats() -> bool:  # three per TTL
            return beats >= 8

        async with store.registration(draft("a"), load):
            await eventually(eight_beats)
            assert await ids(store) == ["a"]


def verified(*steps: tuple[list[int], int]) -> SpeculationStats:
    """One step per (depths of its nodes, accepted tokens)."""
    stats = SpeculationStats()
    for depths, accepted in steps:
        deepest = max(depths, default=0)
        stats.record(len(depths), deepest, min(accepted, deepest))
    return stats


class TestAcceptance:
    async def test_counts_of_a_pair_add_up(self, store: StateStore) -> None:
        cells = (3, *[0] * 10, 1, 1), (1, *[0] * 10, 1, 1)
        await store.acceptance.record("m", "ngram", AcceptanceCounts(5, (2, 2), (2, 1), *cells))
        await store.acceptance.record("m", "ngram", AcceptanceCounts(3, (1, 1, 1), (1, 0, 0)))
        totals = await store.acceptance.acceptance("m", "ngram")
        assert totals.drafted == pytest.approx(8)
        assert totals.drafted_by_depth == pytest.approx((3, 3, 1))
        assert totals.accepted_by_depth == pytest.approx((3, 1, 0))
        assert totals.calibration() == pytest.approx([0.5, 1.0])
        assert totals.accepted == pytest.approx(4)

    async def test_every_calibration_cell_is_stored(self, store: StateStore) -> None:
        drafted, accepted = [i + 0.5 for i in range(Calibration.CELLS)], [i / 4 for i in range(Calibration.CELLS)]
        await store.acceptance.record("m", "ngram", AcceptanceCounts(cell_drafted=drafted, cell_accepted=accepted))
        totals = await store.acceptance.acceptance("m", "ngram")
        assert totals.cell_drafted == pytest.approx(drafted)
        assert totals.cell_accepted == pytest.approx(accepted)

    async def test_pairs_are_kept_apart_whatever_their_names(self, store: StateStore) -> None:
        await store.acceptance.record("a:b", "c", AcceptanceCounts(1))
        await store.acceptance.record("a", "b:c", AcceptanceCounts(2))
        assert (await store.acceptance.acceptance("a:b", "c")).drafted == 1
        assert (await store.acceptance.acceptance("a", "b:c")).drafted == 2
        assert await store.acceptance.acceptance("never", "seen") == AcceptanceCounts()

    async def test_simultaneous_records_lose_nothing(self, store: StateStore) -> None:
        one = AcceptanceCounts(1, (1,), (1,))
        await asyncio.gather(*(store.acceptance.record("m", "ngram", one) for _ in range(100)))
        assert (await store.acceptance.acceptance("m", "ngram")).accepted == pytest.approx(100)

    async def test_totals_in_redis_decay_and_rates_do_not(self, redis_url: str, redis: Redis) -> None:
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
        self, fields: dict[str, str], redis_store: StateStore, redis: Redis
    ) -> None:
        """Targets read it when they start: what another version wrote must not stop them."""
        await redis.hset("paceline:acceptance:m:ngram", mapping=fields)  # type: ignore[misc]
        assert await redis_store.acceptance.acceptance("m", "ngram") == AcceptanceCounts()

    def test_rates_are_conditional_on_all_earlier_positions(self) -> None:
        stats = verified(*(([1, 2], accepted) for accepted in (0, 1, 2, 2, 2)))
        counts = AcceptanceCounts.of(stats)
        assert counts.rates() == [4 / 5, 3 / 4]
        assert counts.acceptance_length == stats.acceptance_length == 7 / 5

    @given(st.lists(st.tuples(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 6)), max_size=20))
    def test_rates_are_between_0_and_1_for_any_trees(self, steps: list[tuple[list[int], int]]) -> None:
        assert all(0 <= rate <= 1 for rate in AcceptanceCounts.of(verified(*steps)).rates())


def running(request_id: str, drafted: int = 3) -> RequestAcceptance:
    return RequestAcceptance(request_id, "family/target", "draft_model", (drafted, 2), (2, 1), ("draft-1",), 1.5)


class TestRecorder:
    async def test_writes_the_newest_request_for_an_hour_and_the_sum_of_counts(
        self, redis_store: StateStore, redis: Redis
    ) -> None:
        async with redis_store.recorder(interval_s=3600) as recorder:
            for drafted in range(3):
                recorder.save(running("a", drafted))
                recorder.count("m", "ngram", AcceptanceCounts(1, (1,), (1,)))
            recorder.save(running("b"))
            recorder.finish("b")
            assert not await redis.exists("paceline:request:a")
        assert json.loads(await redis.get("paceline:request:a")) == {
            "request_id": "a",
            "model": "family/target",
            "speculator": "draft_model",
            "drafted_by_depth": [2, 2],
            "accepted_by_depth": [2, 1],
            "drafts": ["draft-1"],
            "updated_at": 1.5,
        }
        assert 3540 < await redis.ttl("paceline:request:a") <= 3600
        assert not await redis.exists("paceline:request:b")
        assert (await redis_store.acceptance.acceptance("m", "ngram")).drafted == pytest.approx(3)

    async def test_writes_in_the_background(self, store: StateStore) -> None:
        """Nothing that is counted during a write is lost, or counted twice."""
        async with store.recorder(interval_s=0.001) as recorder:
            for _ in range(200):
                recorder.save(running("a"))
                for _ in range(10):
                    recorder.count("m", "ngram", AcceptanceCounts(1, (1,), (1,)))
                await asyncio.sleep(0)

            async def written() -> bool:
                return (await store.acceptance.acceptance("m", "ngram")).drafted == pytest.approx(2000)

            await eventually(written)

    async def test_drops_the_oldest_of_too_many_pending_requests(self, redis_store: StateStore, redis: Redis) -> None:
        async with redis_store.recorder(interval_s=3600) as recorder:
            for number in range(MAX_PENDING_REQUESTS + 1):
                recorder.save(running(str(number)))
        assert await redis.exists("paceline:request:0", "paceline:request:1") == 1


class TestOpening:
    async def test_an_unreachable_redis_names_the_option_without_secrets(self) -> None:
        with EmbeddedRedis() as redis:
            stopped = redis.url
        with pytest.raises(StateError, match=r"does not answer.*--redis-url") as raised:
            async with open_store(stopped.replace("//", "//user:secret@")):
                pass
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)

    async def test_a_malformed_url(self) -> None:
        with pytest.raises(StateError, match="--redis-url http://x is no Redis URL"):
            async with open_store("http://x"):
                pass
