"""Shared state: one contract, kept by Redis and by its in-memory twin."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from paceline.core.messages import SpeculationStats
from paceline.core.policy.calibration import Calibration
from paceline.state import AcceptanceCounts, RequestState, StateError, StateStore, WorkerRecord, open_store, redis_keys
from paceline.state.acceptance import REQUEST_TTL_S
from paceline.state.acceptance_recorder import MAX_PENDING_REQUESTS
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.state.memory_store import MemoryAcceptance

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
    async with open_store(url, ttl_s=TTL_S) as store:
        yield store


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


def draft(worker_id: str, started_at: float = 1.0) -> WorkerRecord:
    return WorkerRecord("draft", worker_id, "127.0.0.1:4000", "family/draft", "draft_model", "abc", started_at)


def request_state(request_id: str, committed: tuple[int, ...] = (5, 6)) -> RequestState:
    return RequestState(
        request_id,
        model="family/target",
        speculator="draft_model",
        seed=2**64 - 1,
        prompt_length=7,
        committed=committed,
        drafted_by_depth=(3, 2),
        accepted_by_depth=(2, 1),
        moving_average=0.6,
        drafts=("draft-1", "draft-2"),
        updated_at=1.5,
    )


class TestRegistry:
    async def test_lists_the_workers_of_a_kind_oldest_first(self, store: StateStore) -> None:
        target = dataclasses.replace(draft("t"), kind="target", numerics="native avx2; float32")
        for record in (draft("young", 2.0), target, draft("old", 1.0)):
            await store.registry.register(record)
        assert [worker.record for worker in await store.registry.workers("draft")] == [
            draft("old", 1.0),
            draft("young", 2.0),
        ]
        assert [worker.record for worker in await store.registry.workers("target")] == [target]

    async def test_a_heartbeat_brings_the_load_and_announces_a_worker_unheard_of(self, store: StateStore) -> None:
        await store.registry.heartbeat(draft("a"), {"running": 1})
        await store.registry.heartbeat(draft("a"), {"running": 2, "step_s": 0.25})
        (worker,) = await store.registry.workers("draft")
        assert worker.load == {"running": 2, "step_s": 0.25}

    async def test_a_silent_worker_vanishes_and_one_with_a_heartbeat_stays(self, store: StateStore) -> None:
        await store.registry.register(draft("silent"))

        async def only_the_beating_one_is_left() -> bool:
            await store.registry.heartbeat(draft("beating"), {})
            return [w.record.worker_id for w in await store.registry.workers("draft")] == ["beating"]

        assert len(await store.registry.workers("draft")) == 1
        await eventually(only_the_beating_one_is_left)

    async def test_a_worker_that_deregisters_is_gone_at_once(self, store: StateStore) -> None:
        await store.registry.register(draft("a"))
        await store.registry.deregister(draft("a"))
        await store.registry.deregister(draft("never seen"))
        assert await store.registry.workers("draft") == []

    async def test_the_epoch_lasts_as_long_as_the_memory(self, store: StateStore) -> None:
        assert await store.registry.epoch() == await store.registry.epoch() != ""

    async def test_a_record_of_an_older_worker_is_read(self, redis_url: str, redis: Redis) -> None:
        """It says nothing of its numerics."""
        record = dataclasses.asdict(draft("old"))
        del record["numerics"]
        async with open_store(redis_url) as store:
            await redis.sadd(redis_keys.workers("draft"), "old")
            await redis.set(redis_keys.worker("draft", "old"), json.dumps({"record": record, "load": {}}))
            assert [worker.record for worker in await store.registry.workers("draft")] == [draft("old")]
            assert draft("old").numerics == ""

    async def test_a_record_nobody_can_read_hides_no_other(self, redis_url: str, redis: Redis) -> None:
        async with open_store(redis_url) as store:
            await store.registry.register(draft("a"))
            await redis.sadd(redis_keys.workers("draft"), "from the future")
            await redis.set(redis_keys.worker("draft", "from the future"), '{"record": 3}')
            assert [w.record.worker_id for w in await store.registry.workers("draft")] == ["a"]


class TestRegistrationAndWatcher:
    async def test_a_worker_is_known_for_as_long_as_its_registration_lasts(self, store: StateStore) -> None:
        load = {"running": 0.0}
        async with store.watcher("draft", interval_s=0.02) as watcher:
            async with store.registration(draft("a"), lambda: load):
                (worker,) = await watcher.wait_for(lambda workers: len(workers) == 1)
                assert worker.record == draft("a")
                load["running"] = 5.0
                (before,) = await watcher.wait_for(lambda workers: workers[0].load["running"] == 5.0)
                (after,) = await watcher.wait_for(lambda workers: workers[0].load != before.load)
                assert after.load == {"running": 5.0, "beat": before.load["beat"] + 1}, "the same load is news again"
            assert await store.registry.workers("draft") == []
            # The first look found a new epoch, so this worker is let go only after one TTL.
            assert await watcher.wait_for(lambda workers: not workers) == []

    async def test_heartbeats_outlive_the_ttl(self, store: StateStore) -> None:
        beats = asyncio.Semaphore(0)

        def load() -> dict[str, float]:
            beats.release()
            return {}

        async with store.registration(draft("a"), load):
            for _ in range(8):  # three to a TTL
                await beats.acquire()
            assert len(await store.registry.workers("draft")) == 1

    async def test_a_worker_whose_load_cannot_be_told_once_is_listed_again(self, store: StateStore) -> None:
        loads: Iterator[dict[str, float] | None] = iter([{}, None])

        def load() -> dict[str, float]:
            told = next(loads, {"running": 1.0})
            if told is None:
                raise RuntimeError("the engine is being rebuilt")
            return told

        async def told_again() -> bool:
            return [worker.load.get("running") for worker in await store.registry.workers("draft")] == [1.0]

        async with store.registration(draft("a"), load):
            await eventually(told_again)


class TestRequests:
    async def test_states_come_back_as_they_were_saved(self, store: StateStore) -> None:
        states = [request_state("a"), request_state("b", tuple(range(1000)))]
        await store.acceptance.save_requests(states)
        assert [await store.acceptance.load_request(s.request_id) for s in states] == states
        assert states[1].committed_length == 1000

    async def test_the_newest_state_counts_and_a_finished_request_is_forgotten(self, store: StateStore) -> None:
        await store.acceptance.save_request(request_state("a", (1,)))
        await store.acceptance.save_requests([request_state("a", (1, 2)), request_state("b")], finished=["b"])
        assert await store.acceptance.load_request("a") == request_state("a", (1, 2))
        assert await store.acceptance.load_request("b") is None
        await store.acceptance.delete_request("a")
        assert await store.acceptance.load_request("a") is None

    async def test_redis_forgets_after_an_hour(self, redis_url: str, redis: Redis) -> None:
        async with open_store(redis_url) as store:
            await store.acceptance.save_request(request_state("a"))
        assert REQUEST_TTL_S - 60 < await redis.ttl(redis_keys.request("a")) <= REQUEST_TTL_S

    async def test_the_twin_forgets_after_an_hour(self) -> None:
        now = 0.0
        twin = MemoryAcceptance(half_life_s=1.0, clock=lambda: now)
        await twin.save_requests([request_state("a"), request_state("b")])
        now = REQUEST_TTL_S - 1
        await twin.save_request(request_state("a"))
        now = REQUEST_TTL_S + 1
        assert await twin.load_request("b") is None
        assert await twin.load_request("a") is not None


class TestAcceptance:
    async def test_counts_of_a_pair_add_up(self, url: str | None) -> None:
        async with open_store(url, half_life_s=1e9) as store:
            await store.acceptance.record(
                "m", "ngram", AcceptanceCounts(5, (2, 2), (2, 1), (3, *[0] * 10, 1, 1), (1, *[0] * 10, 1, 1))
            )
            await store.acceptance.record("m", "ngram", AcceptanceCounts(3, (1, 1, 1), (1, 0, 0)))
            totals = await store.acceptance.acceptance("m", "ngram")
        assert totals.drafted == pytest.approx(8)
        assert totals.drafted_by_depth == pytest.approx((3, 3, 1))
        assert totals.accepted_by_depth == pytest.approx((3, 1, 0))
        assert totals.calibration() == pytest.approx([0.5, 1.0])
        assert totals.accepted == pytest.approx(4)

    async def test_every_cell_comes_back_as_it_was(self, url: str | None) -> None:
        drafted, accepted = [i + 0.5 for i in range(Calibration.CELLS)], [i / 4 for i in range(Calibration.CELLS)]
        async with open_store(url, half_life_s=1e9) as store:
            await store.acceptance.record("m", "ngram", AcceptanceCounts(cell_drafted=drafted, cell_accepted=accepted))
            totals = await store.acceptance.acceptance("m", "ngram")
        assert totals.cell_drafted == pytest.approx(drafted)
        assert totals.cell_accepted == pytest.approx(accepted)

    async def test_what_an_older_release_stored_is_passed_over(self, redis_url: str, redis: Redis) -> None:
        """It counted by bin, in fields of other names, of which there are fewer."""
        await redis.hset(redis_keys.acceptance("m", "ngram"), mapping={"bin_drafted:0": "7", "bin_accepted:0": "5"})
        async with open_store(redis_url) as store:
            assert await store.acceptance.acceptance("m", "ngram") == AcceptanceCounts()
            await store.acceptance.record("m", "ngram", AcceptanceCounts(1, cell_drafted=(2.0,), cell_accepted=(1.0,)))
            assert (await store.acceptance.acceptance("m", "ngram")).cell_drafted == pytest.approx((2,))

    async def test_pairs_are_kept_apart_whatever_their_names(self, store: StateStore) -> None:
        await store.acceptance.record("a:b", "c", AcceptanceCounts(1))
        await store.acceptance.record("a", "b:c", AcceptanceCounts(2))
        assert (await store.acceptance.acceptance("a:b", "c")).drafted == 1
        assert (await store.acceptance.acceptance("a", "b:c")).drafted == 2
        assert await store.acceptance.acceptance("never", "seen") == AcceptanceCounts()

    async def test_simultaneous_records_lose_nothing(self, url: str | None) -> None:
        async with open_store(url, half_life_s=1e9) as store:
            one = AcceptanceCounts(1, (1,), (1,))
            await asyncio.gather(*(store.acceptance.record("m", "ngram", one) for _ in range(100)))
            assert (await store.acceptance.acceptance("m", "ngram")).accepted == pytest.approx(100)

    async def test_old_totals_fade_and_rates_do_not(self, url: str | None) -> None:
        async with open_store(url, half_life_s=0.05) as store:
            await store.acceptance.record("m", "ngram", AcceptanceCounts(10, (10,), (8,)))

            async def faded() -> bool:
                await store.acceptance.record("m", "ngram", AcceptanceCounts())
                return (await store.acceptance.acceptance("m", "ngram")).drafted < 2.5

            await eventually(faded)
            assert (await store.acceptance.acceptance("m", "ngram")).rates() == pytest.approx([0.8])

    async def test_the_twin_halves_in_a_half_life(self) -> None:
        now = 100.0
        twin = MemoryAcceptance(half_life_s=60.0, clock=lambda: now)
        await twin.record("m", "ngram", AcceptanceCounts(8, (8,), (4,)))
        now = 160.0
        await twin.record("m", "ngram", AcceptanceCounts(1, (1,), (1,)))
        assert await twin.acceptance("m", "ngram") == AcceptanceCounts(5.0, (5.0,), (3.0,))

    def test_rates_are_conditional_on_all_earlier_positions(self) -> None:
        stats = SpeculationStats()
        for accepted in (0, 1, 2, 2, 2):
            stats.record(2, 2, accepted)
        counts = AcceptanceCounts.of(stats)
        assert counts.rates() == [4 / 5, 3 / 4]
        assert counts.acceptance_length == stats.acceptance_length == 7 / 5

    @given(st.lists(st.tuples(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 6)), max_size=20))
    def test_rates_are_rates_for_any_trees(self, steps: list[tuple[list[int], int]]) -> None:
        stats = SpeculationStats()
        for depths, accepted in steps:
            deepest = max(depths, default=0)
            stats.record(len(depths), deepest, min(accepted, deepest))
        assert all(0 <= rate <= 1 for rate in AcceptanceCounts.of(stats).rates())


@pytest.mark.parametrize("fields", [{"cell_drafted:1": "2"}, {"drafted": "many"}], ids=["a gap", "no number"])
async def test_acceptance_that_cannot_be_read_is_learned_again(
    fields: dict[str, str], redis_url: str, redis: Redis
) -> None:
    """Targets ask for it when they start: what another version wrote must not keep them from it."""
    await redis.hset(redis_keys.acceptance("m", "ngram"), mapping=fields)  # type: ignore[misc]
    async with open_store(redis_url) as store:
        assert await store.acceptance.acceptance("m", "ngram") == AcceptanceCounts()


class TestRecorder:
    async def test_writes_the_newest_state_and_the_sum_of_counts(self, store: StateStore) -> None:
        async with store.recorder(interval_s=3600) as recorder:
            for length in range(3):
                recorder.save("a", partial(request_state, "a", (1,) * length))
                recorder.count("m", "ngram", AcceptanceCounts(1, (1,), (1,)))
            recorder.save("b", partial(request_state, "b"))
            recorder.finish("b")
            assert await store.acceptance.load_request("a") is None
        assert await store.acceptance.load_request("a") == request_state("a", (1, 1))
        assert await store.acceptance.load_request("b") is None
        assert (await store.acceptance.acceptance("m", "ngram")).drafted == 3

    async def test_writes_in_the_background(self, store: StateStore) -> None:
        async with store.recorder(interval_s=0.01) as recorder:
            recorder.save("a", partial(request_state, "a"))

            async def written() -> bool:
                return await store.acceptance.load_request("a") is not None

            await eventually(written)

    async def test_counts_while_it_writes(self, url: str | None) -> None:
        """Nothing that is counted during a write is lost, or counted twice."""
        async with open_store(url, half_life_s=1e9) as store, store.recorder(interval_s=0.001) as recorder:
            for _ in range(200):
                for _ in range(10):
                    recorder.count("m", "ngram", AcceptanceCounts(1, (1,), (1,)))
                await asyncio.sleep(0)
            await recorder.run_once()
            assert (await store.acceptance.acceptance("m", "ngram")).drafted == pytest.approx(2000)

    async def test_gives_up_the_longest_waiting_when_too_many_wait(self, store: StateStore) -> None:
        async with store.recorder(interval_s=3600) as recorder:
            for number in range(MAX_PENDING_REQUESTS + 1):
                recorder.save(str(number), partial(request_state, str(number)))
        assert await store.acceptance.load_request("0") is None
        assert await store.acceptance.load_request("1") is not None


class TestOpening:
    async def test_nobody_there_says_what_to_do_without_secrets(self) -> None:
        with EmbeddedRedis() as redis:
            nobody = redis.url
        with pytest.raises(StateError, match=r"does not answer.*--redis-url") as raised:
            async with open_store(nobody.replace("//", "//user:secret@")):
                pass
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)

    async def test_a_url_that_is_none(self) -> None:
        with pytest.raises(StateError, match="--redis-url http://x is no Redis URL"):
            async with open_store("http://x"):
                pass
