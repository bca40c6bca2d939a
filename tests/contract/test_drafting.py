"""`RemoteDrafting` against real draft workers over loopback: what the engine says arrives, and growth comes back."""

import asyncio
import logging

import pytest
import torch

from paceline.drafting.speculator import Commit, Context, Limit
from paceline.engine.draft_client import DraftUpdates
from paceline.wire.session_messages import ConnectDrafts
from tests.helpers.workers import Counting, Witness, draft_worker, nodes, opening, target, until


async def test_growth_arrives_unasked() -> None:
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        assert here.drafting.open(opening(1), [worker.address]) == "one"
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert nodes(news, 1) == [8, 9, 10]
        assert [growth.base_position for _, growth in news.growths] == [2] * len(news.growths)
        assert not news.lost


async def test_commit_moves_the_root() -> None:
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        here.drafting.open(opening(1), [worker.address])
        here.drafting.flush()
        await here.poll(lambda news: len(nodes(news, 1)) == 3)
        here.drafting.commit(Commit(1, 2, [8, 500], 1))
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert nodes(news, 1) == [501, 502, 503]
        assert {growth.base_position for _, growth in news.growths} == {4}


async def test_one_frame_says_all_of_a_step() -> None:
    """Between two flushes nothing leaves; then everything does, in one frame."""
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        for request_id in (1, 2, 3):
            here.drafting.open(opening(request_id), [worker.address])
        here.drafting.close(2)
        assert worker.servicer.open_requests == 0
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 2)
        news = await here.poll(lambda news: len(nodes(news, 1)) == len(nodes(news, 3)) == 3)
        assert nodes(news, 2) == []


class Remembering(Counting):
    """Knows the tokens of requests that have ended, as suffix decoding does."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[list[int]] = []
        self._said: dict[int, list[int]] = {}

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self._said.setdefault(commit.request_id, []).extend(commit.tokens)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self.ended.append(self._said.pop(request_id, []))


async def test_the_last_tokens_reach_a_worker_before_the_end_of_their_request() -> None:
    """In one frame, with the commits of others around."""
    speculator = Remembering()
    async with draft_worker(speculator) as worker, target() as here:
        await here.reach(worker.address)
        for request_id in (1, 2):
            here.drafting.open(opening(request_id), [worker.address])
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 2)
        here.drafting.commit(Commit(1, 2, [8, 9], 1))
        here.drafting.close(1)
        here.drafting.commit(Commit(2, 2, [500], 0))
        assert speculator.ended == []
        here.drafting.flush()
        await until(lambda: speculator.ended != [])
        assert speculator.ended == [[8, 9]]
        await here.poll(lambda news: 501 in nodes(news, 2))


async def test_a_limited_request_stays_open() -> None:
    """Paused or not, the worker holds it until the target closes it."""
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        here.drafting.open(opening(1), [worker.address])
        here.drafting.flush()
        await here.poll(lambda news: len(nodes(news, 1)) == 3)
        here.drafting.limit(Limit(1, 0, 0))
        here.drafting.commit(Commit(1, 2, [500], 0))
        here.drafting.flush()
        await here.poll(lambda news: 501 in nodes(news, 1))  # so it has heard the limit, which `Counting` does not mind
        assert worker.servicer.open_requests == 1
        here.drafting.close(1)
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 0)


async def test_late_growth_is_dropped() -> None:
    """Growth for a request that was closed here while it was under way reaches nobody."""
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        here.drafting.open(opening(1), [worker.address])
        here.drafting.flush()
        await until(lambda: worker.servicer.open_requests == 1)
        here.drafting.close(1)
        here.drafting.open(opening(2), [worker.address])
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 2)) == 3)
        assert nodes(news, 1) == []
        assert here.connected == [worker.address]


async def test_poll_returns_at_once_when_something_comes() -> None:
    """A poll that could wait for ever ends with the first growth."""
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        polling = asyncio.create_task(asyncio.to_thread(here.drafting.poll, 3600.0))
        here.drafting.open(opening(1), [worker.address])
        here.drafting.flush()
        async with asyncio.timeout(10):
            assert (await polling).growths


async def test_poll_without_news() -> None:
    async with target() as here:
        assert here.drafting.poll(0.0) == DraftUpdates()
        assert here.drafting.poll(0.01) == DraftUpdates()


async def test_nobody_is_reachable() -> None:
    async with target() as here:
        assert here.drafting.open(opening(1), []) is None
        assert here.drafting.open(opening(1), ["127.0.0.1:9"]) is None
        here.drafting.commit(Commit(1, 2, [8], 1))
        here.drafting.close(1)
        here.drafting.flush()


async def test_naming_a_worker_reaches_for_it() -> None:
    async with draft_worker() as worker, target() as here:
        assert here.drafting.open(opening(1), [worker.address]) is None
        await until(lambda: here.connected == [worker.address])
        assert here.drafting.open(opening(1), [worker.address]) == "one"


async def test_two_targets_share_a_draft() -> None:
    """Both call their request 1; each gets its own growth, and one's end does not touch the other."""
    async with draft_worker() as worker, target() as here:
        async with target() as there:
            await here.reach(worker.address)
            await there.reach(worker.address)
            for each, token in ((here, 10), (there, 20)):
                each.drafting.open(opening(1, tokens=[token]), [worker.address])
                each.drafting.flush()
            assert nodes(await here.poll(lambda news: len(nodes(news, 1)) == 3), 1) == [11, 12, 13]
            assert nodes(await there.poll(lambda news: len(nodes(news, 1)) == 3), 1) == [21, 22, 23]
        await until(lambda: worker.servicer.open_requests == 1)
        here.drafting.commit(Commit(1, 0, [11], 1))
        here.drafting.flush()
        assert nodes(await here.poll(lambda news: bool(news.growths)), 1)[0] == 14


async def test_another_vocabulary_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Foreign(Counting):
        vocabulary_fingerprint = "v2"

    async with draft_worker(Foreign()) as worker, target() as here:
        here.pool.connect(ConnectDrafts([worker.address]))
        await until(lambda: "its vocabulary v2 is not the target's v1" in caplog.text)
        assert here.connected == []
        assert here.drafting.open(opening(1), [worker.address]) is None


async def test_a_worker_that_drops_a_request_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with draft_worker(Counting(longest=2)) as small, draft_worker(worker_id="two") as large, target() as here:
        await here.reach(small.address, large.address)
        both = [small.address, large.address]
        assert here.drafting.open(opening(1), both) == "one"
        here.drafting.flush()
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        assert "longer than 2" in caplog.text
        assert here.drafting.open(opening(1), both) == "two"
        assert here.drafting.open(opening(2, tokens=[1]), both) == "one"
        here.drafting.close(1)
        assert here.drafting.open(opening(1), both) == "one", "a closed request leaves no grudge"


async def test_hidden_states_reach_a_speculator_that_asks() -> None:
    witness = Witness()
    async with draft_worker(witness) as worker, target() as here:
        await here.reach(worker.address)
        here.drafting.open(opening(1, tokens=[5, 6, 7]), [worker.address])
        here.drafting.context(Context(1, 0, states([5], 0)))
        here.drafting.context(Context(1, 1, states([6], 1)))
        here.drafting.commit(Commit(1, 2, [8, 9], 1, states([7, 8], 2)))
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert nodes(news, 1) == [10, 11, 12]
        assert list(witness.seen.values()) == [{0: 5, 1: 6, 2: 7, 3: 8}]


async def test_hidden_states_go_only_to_who_asks() -> None:
    """A worker that needs ids only would close the link if it were sent more."""
    async with draft_worker() as worker, target() as here:
        await here.reach(worker.address)
        here.drafting.open(opening(1), [worker.address])
        here.drafting.context(Context(1, 0, states([5, 6], 0)))
        here.drafting.commit(Commit(1, 2, [100], 0, states([7], 2)))
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert nodes(news, 1) == [101, 102, 103]
        assert not news.lost


class Deeper(Witness):
    """`layers`: what it asks for."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.hidden_state_layers = layers  # type: ignore[assignment]


async def test_a_target_learns_what_to_send_from_its_drafts() -> None:
    async with draft_worker() as modest, draft_worker(Witness()) as worker, target() as here:
        await here.reach(modest.address)
        assert here.drafting.hidden_state_layers == ()
        await here.reach(worker.address)
        assert here.drafting.hidden_state_layers == (0, 3)


async def test_drafts_that_ask_for_other_layers_wait_until_none_of_the_first_kind_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with draft_worker(Deeper(1, 2)) as late, target() as here:
        async with draft_worker(Witness()) as first:
            await here.reach(first.address)
            here.pool.connect(ConnectDrafts([late.address]))
            await until(lambda: "asks for hidden states of layers (1, 2)" in caplog.text)
            assert here.connected == [first.address]
        await here.reach(late.address)
        assert here.drafting.hidden_state_layers == (1, 2)


@pytest.mark.parametrize("layers", [(0, 4), (1, 1)], ids=["too deep", "twice"])
async def test_layers_that_a_target_has_not_are_refused(
    layers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with draft_worker(Deeper(*layers)) as worker, target() as here:
        here.pool.connect(ConnectDrafts([worker.address]))
        await until(lambda: f"asks for hidden states of layers {layers}, this target has 0 to 3" in caplog.text)
        assert here.connected == []


def states(tokens: list[int], position: int) -> torch.Tensor:
    """[positions, 2 layers, 2], as a table model makes them: token and position, the same in both layers."""
    facts = [[token, position + i] for i, token in enumerate(tokens)]
    return torch.tensor(facts, dtype=torch.float32).unsqueeze(1).repeat(1, 2, 1)
