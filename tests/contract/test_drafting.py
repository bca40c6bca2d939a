"""`RemoteDraftClient` against real draft workers over loopback."""

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from paceline.drafting.speculator import Commit, Context, Limit
from paceline.engine.draft_client import PollResult
from paceline.wire.draft_stream_messages import ConnectDrafts
from tests.helpers.waiting import until
from tests.helpers.workers import Counting, RecordingSpeculator, draft_worker, nodes, opening, target


async def test_a_step_is_sent_as_one_frame() -> None:
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        for request_id in (1, 2, 3):
            here.drafting.open(opening(request_id), [worker.address])
        here.drafting.close(2)
        assert worker.servicer.open_requests == 0
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 2)
        updates = await here.poll(lambda updates: len(nodes(updates, 1)) == len(nodes(updates, 3)) == 3)
        assert nodes(updates, 2) == []


class Remembering(Counting):
    """Notes the commits and closes of requests, as suffix decoding needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Commit | int] = []

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self.noted.append(commit)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self.noted.append(request_id)


async def test_the_last_commit_of_a_frame_is_applied_before_the_close() -> None:
    speculator = Remembering()
    async with draft_worker(speculator) as worker, target() as here:
        await here.open(1, worker.address)
        await here.open(2, worker.address)
        await until(lambda: worker.servicer.open_requests == 2)
        last, other = Commit(1, 2, [8, 9], 1), Commit(2, 2, [500], 0)
        here.drafting.commit(last)
        here.drafting.close(1)
        here.drafting.commit(other)
        here.drafting.flush()
        await until(lambda: len(speculator.noted) == 3)
        assert speculator.noted.index(last) < speculator.noted.index(1)
        await here.poll(lambda updates: 501 in nodes(updates, 2))


async def test_a_paused_request_stays_open() -> None:
    async with draft_worker() as worker, target() as here:
        await here.open(1, worker.address)
        await here.drafted(1)
        here.drafting.limit(Limit(1, 0, 0))
        here.commit(1, 2, [500], 0)
        await here.poll(lambda updates: 501 in nodes(updates, 1))  # `Counting` has applied the limit, and ignores it
        assert worker.servicer.open_requests == 1


async def test_growth_of_a_closed_request_is_ignored() -> None:
    async with draft_worker() as worker, target() as here:
        await here.open(1, worker.address)
        await until(lambda: worker.servicer.open_requests == 1)
        here.drafting.close(1)
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 0)
        await here.open(2, worker.address)
        assert nodes(await here.poll(lambda updates: len(nodes(updates, 2)) == 3), 1) == []
        assert here.connected == [worker.address]


async def test_poll_returns_with_the_first_growth_or_after_its_timeout() -> None:
    async with draft_worker() as worker, target() as here:
        assert here.drafting.poll(0.0) == PollResult()
        assert here.drafting.poll(0.01) == PollResult()
        await here.reach(worker.address)
        polling = asyncio.create_task(asyncio.to_thread(here.drafting.poll, 3600.0))
        here.drafting.open(opening(1), [worker.address])
        here.drafting.flush()
        async with asyncio.timeout(10):
            assert (await polling).growths


async def test_naming_a_worker_connects_to_it() -> None:
    """Until it is reached, the request goes on without a draft."""
    async with draft_worker() as worker, target() as here:
        assert here.drafting.open(opening(1), []) is None
        assert here.drafting.open(opening(1), ["127.0.0.1:9", worker.address]) is None
        here.drafting.commit(Commit(1, 2, [8], 1))
        here.drafting.close(1)
        here.drafting.flush()
        await until(lambda: here.connected == [worker.address])
        assert here.drafting.open(opening(1), [worker.address]) == "one"


async def test_two_targets_share_a_draft() -> None:
    """Both use request id 1. Each gets its own growth, and closing one link does not affect the other."""
    async with draft_worker() as worker, target() as here:
        async with target() as there:
            await here.open(1, worker.address, tokens=[10])
            await there.open(1, worker.address, tokens=[20])
            assert await here.drafted(1) == [11, 12, 13]
            assert await there.drafted(1) == [21, 22, 23]
        await until(lambda: worker.servicer.open_requests == 1)
        here.commit(1, 0, [11], 1)
        assert (await here.drafted(1, 1))[0] == 14


async def test_a_worker_that_dropped_a_request_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with draft_worker(Counting(longest=2)) as small, draft_worker(worker_id="two") as large, target() as here:
        await here.reach(large.address)
        assert await here.open(1, small.address) == "one"
        assert await here.lost() == [1]
        assert "longer than 2" in caplog.text
        both = [small.address, large.address]
        assert here.drafting.open(opening(1), both) == "two"
        assert here.drafting.open(opening(2, tokens=[1]), both) == "one"
        here.drafting.close(1)
        assert here.drafting.open(opening(1), both) == "one", "drops are forgotten when the request closes"


async def test_a_drop_of_a_closed_request_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with draft_worker(Counting(longest=2)) as worker, target() as here:
        await here.open(1, worker.address)
        await until(lambda: "longer than 2" in caplog.text)  # the drop is in the engine's pipe
        here.drafting.close(1)
        assert here.drafting.poll(0.0) == PollResult()
        assert here.drafting.open(opening(1, tokens=[1]), [worker.address]) == "one"
        here.drafting.flush()
        assert await here.drafted(1) == [2, 3, 4]


def foreign() -> Counting:
    speculator = Counting()
    speculator.description = replace(speculator.description, vocabulary_fingerprint="v2")
    return speculator


@pytest.mark.parametrize(
    ("speculator", "reason"),
    [
        (foreign(), "its vocabulary v2 is not the target's v1"),
        (RecordingSpeculator(layers=(0, 4)), "asks for hidden states of layers (0, 4), this target has 0 to 3"),
        (RecordingSpeculator(layers=(1, 1)), "asks for hidden states of layers (1, 1), this target has 0 to 3"),
    ],
    ids=["another vocabulary", "no such layer", "a layer twice"],
)
async def test_an_incompatible_worker_is_refused(
    speculator: Counting, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with draft_worker(speculator) as worker, target() as here:
        here.pool.connect(ConnectDrafts([worker.address]))
        await until(lambda: reason in caplog.text)
        assert here.connected == []
        assert here.drafting.open(opening(1), [worker.address]) is None


async def test_all_workers_of_a_target_must_ask_for_the_same_layers(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that asks for others can be used once none of the first kind is left."""
    async with draft_worker() as ids_only, draft_worker(RecordingSpeculator(layers=(1, 2))) as late, target() as here:
        await here.reach(ids_only.address)
        assert here.drafting.hidden_state_layers == ()
        async with draft_worker(RecordingSpeculator()) as first:
            await here.reach(first.address)
            assert here.drafting.hidden_state_layers == (0, 3)
            here.pool.connect(ConnectDrafts([late.address]))
            await until(lambda: "asks for hidden states of layers (1, 2)" in caplog.text)
            assert set(here.connected) == {ids_only.address, first.address}
        await here.reach(late.address)
        assert here.drafting.hidden_state_layers == (1, 2)


async def test_hidden_states_are_not_sent_to_a_worker_that_asks_for_none() -> None:
    """It would close the link."""
    async with draft_worker() as worker, target() as here:
        await here.open(1, worker.address)
        await here.drafted(1)
        here.drafting.context(Context(1, 0, states([5, 6], 0)))
        here.commit(1, 2, [100], 0, states([7], 2))
        updates = await here.poll(lambda updates: len(nodes(updates, 1)) == 3)
        assert nodes(updates, 1) == [101, 102, 103]
        assert not updates.lost


def states(tokens: list[int], position: int) -> torch.Tensor:
    """Hidden states of a table model, [positions, 2 layers, 2]: token and position, the same in both layers."""
    rows = [[token, position + i] for i, token in enumerate(tokens)]
    return torch.tensor(rows, dtype=torch.float32).unsqueeze(1).repeat(1, 2, 1)
