"""Whatever a draft worker does, its requests are reported lost once, and nobody else notices."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.drafting.speculator import Commit
from paceline.engine.draft_client import DraftUpdates
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.draft_codec import MAX_NODES
from paceline.wire.node_codec import PackedNodes, pack_nodes
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from tests.helpers.workers import (
    FINGERPRINT,
    VOCABULARY,
    Counting,
    Target,
    draft_worker,
    nodes,
    opening,
    serving,
    target,
    until,
)

Frame = draft_pb2.GrowthFrame
Growth = draft_pb2.GrowthFrame.Growth


class Liar(draft_pb2_grpc.DraftServiceServicer):
    """Describes itself well, then answers the first frame with whatever the test wants."""

    def __init__(self, answer: Callable[[draft_pb2.DraftFrame], Frame]) -> None:
        self._answer = answer
        self.ended = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DraftServiceDescribeResponse:  # noqa: N802
        return draft_pb2.DraftServiceDescribeResponse(
            worker_id="liar", method="custom", vocabulary_fingerprint=FINGERPRINT
        )

    async def Grow(self, incoming: AsyncIterator[draft_pb2.DraftFrame], context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        try:
            async for frame in incoming:
                yield self._answer(frame)
        finally:
            self.ended.set()


def packed(tokens: list[int], distances: list[int]) -> bytes:
    return pack_nodes(PackedNodes(tokens, distances, [-0.5] * len(tokens)))


def grown(**changes: Any) -> Callable[[draft_pb2.DraftFrame], Frame]:
    """One good growth, but for these fields."""

    def answer(frame: draft_pb2.DraftFrame) -> Frame:
        fields = {
            "request_id": frame.opens[0].request_id,
            "base_position": 2,
            "first_node_id": 1,
            "nodes": packed([8, 9], [0, 1]),
        }
        return Frame(growths=[Growth(**{**fields, **changes})], applied=1)

    return answer


LIES = {
    "no widths": grown(nodes=b""),
    "a width of no bits": grown(nodes=bytes(8)),
    "half a node": grown(nodes=packed([8, 9], [0, 1])[:-1]),
    "padding that is none": grown(nodes=packed([8, 9], [0, 1])[:-1] + b"\xff"),
    "node 0": grown(first_node_id=0),
    "a parent before all nodes": grown(nodes=packed([8, 9], [0, 2])),
    "token outside the vocabulary": grown(nodes=packed([8, VOCABULARY], [0, 1])),
    "position beyond any context": grown(base_position=2**31),
    "too many nodes": grown(nodes=packed([1] * (MAX_NODES + 1), [0] * (MAX_NODES + 1))),
    "more nodes than a tree may have": lambda frame: Frame(growths=list(grown()(frame).growths) * 5, applied=1),
    "a request that was never opened": grown(request_id=99),
    "request 0": grown(request_id=0),
    "drops what was never opened": lambda frame: Frame(dropped=[Frame.Dropped(request_id=99)], applied=1),
    "applied more than was sent": lambda frame: Frame(applied=2),
    "a frame over the limit": grown(draft_probs={"data": bytes(9 * 2**20)}),
    "not a message": lambda frame: Garbage(),  # type: ignore[dict-item]
}


class Garbage:
    """What a serializer is asked to write when there is no message."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        return b"\xff\xff\xff"


async def test_the_truth_is_believed() -> None:
    """The frame that the lies are made from is itself taken in."""
    async with serving(Liar(grown())) as liar, target() as here:
        await open_at(here, 1, liar.address)
        assert nodes(await here.poll(lambda news: bool(news.growths)), 1) == [8, 9]


@pytest.mark.parametrize("lie", LIES, ids=list(LIES))
async def test_a_lie_closes_that_link_alone(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    servicer = Liar(LIES[lie])
    async with lying(servicer) as address, draft_worker() as honest, target() as here:
        await here.reach(address, honest.address)
        await open_at(here, 1, honest.address)
        await open_at(here, 2, address)
        news = await here.poll(lambda news: bool(news.lost) and len(nodes(news, 1)) == 3)
        await asyncio.wait_for(servicer.ended.wait(), 10)
        assert news.lost == [2]
        assert nodes(news, 2) == []
        assert f"draft {address}" in caplog.text

        here.drafting.commit(Commit(1, 2, [8, 9], 1))
        here.drafting.flush()
        assert nodes(await here.poll(lambda news: bool(news.growths)), 1)[0] == 11
        assert here.drafting.open(opening(2), [honest.address]) == "one"


class Flood(Liar):
    """Drops the request that it is told of, then says the same for ever, as fast as the link takes it."""

    frames = 0

    async def Grow(self, incoming: AsyncIterator[draft_pb2.DraftFrame], context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        frame = await anext(incoming)
        try:
            yield dropping(frame)
            while True:
                yield self._answer(frame)
                self.frames += 1
        finally:
            self.ended.set()


def dropping(frame: draft_pb2.DraftFrame) -> Frame:
    return Frame(dropped=[Frame.Dropped(request_id=frame.opens[0].request_id)], applied=1)


FLOODS = {"nothing": lambda frame: Frame(applied=1), "growth": grown(), "drops": dropping}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_what_concerns_nobody_closes_the_link(flood: str) -> None:
    """Each frame is cheap to say, costs a target its time, and none breaks a rule by itself."""
    servicer = Flood(FLOODS[flood])
    async with lying(servicer) as address, target() as here:
        await open_at(here, 1, address)
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        await asyncio.wait_for(servicer.ended.wait(), 10)
        assert servicer.frames < 100_000, "what is under way when the link closes, and no more"


async def test_a_worker_that_hangs_is_left() -> None:
    """It holds the connection and answers pings, and never applies a frame."""
    silence = asyncio.Event()

    class Hung(Liar):
        async def Grow(self, incoming: Any, context: Any) -> AsyncIterator[Frame]:  # noqa: N802
            await silence.wait()
            yield Frame()

    async with lying(Hung(grown())) as address, target(hang_s=0.2) as here:
        await open_at(here, 1, address)
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        silence.set()


async def test_a_worker_with_nothing_to_guess_is_kept() -> None:
    """Silence after everything was applied is no hanging."""
    async with draft_worker() as worker, target(hang_s=0.05) as here:
        await open_at(here, 1, worker.address, max_depth=0)
        await until(lambda: worker.servicer.open_requests == 1)
        assert await asyncio.to_thread(here.drafting.poll, 0.3) == DraftUpdates()
        assert here.connected == [worker.address]


async def test_a_worker_that_comes_back_is_used_again() -> None:
    async with target() as here:
        async with draft_worker() as first:
            await open_at(here, 1, first.address)
            await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        port = int(first.address.rpartition(":")[2])
        async with serving(Liar(grown()), port) as second:
            await open_at(here, 1, second.address)
            assert nodes(await here.poll(lambda news: bool(news.growths)), 1) == [8, 9]


async def test_a_draining_worker_gives_its_requests_back(caplog: pytest.LogCaptureFixture) -> None:
    async with draft_worker() as leaving, draft_worker(worker_id="two") as staying, target() as here:
        await here.reach(staying.address)
        await open_at(here, 1, leaving.address)
        await open_at(here, 2, staying.address)
        await here.poll(lambda news: len(nodes(news, 1)) == 3)
        leaving.servicer.drain()
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        assert "this draft worker drains" in caplog.text
        both = [leaving.address, staying.address]
        await until(lambda: here.connected == [staying.address])
        assert here.drafting.open(opening(1), both) == "two"


async def test_sigkill_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    """A real process, killed while it drafts; the request goes on elsewhere."""
    caplog.set_level(logging.INFO)
    async with draft_process() as (process, address), draft_worker(worker_id="two") as spare, target() as here:
        await here.reach(address, spare.address)
        both = [address, spare.address]
        tokens = [1, 2, 3, 1, 2]
        assert here.drafting.open(opening(1, tokens=tokens), both) == "killed"
        here.drafting.flush()
        assert nodes(await here.poll(lambda news: bool(news.growths)), 1) == [3, 1, 2]
        process.send_signal(signal.SIGKILL)
        news = await here.poll(lambda news: bool(news.lost))
        assert news.lost == [1]
        assert here.drafting.open(opening(1, tokens=[*tokens, 3]), both) == "two"
        here.drafting.flush()
        news = await here.poll(lambda news: len(nodes(news, 1)) == 3)
        assert nodes(news, 1) == [4, 5, 6]
        assert news.lost == []


BAD_FRAMES = {
    "no tokens": draft_pb2.DraftFrame(opens=[{"request_id": 1}]),
    "an id used twice": draft_pb2.DraftFrame(opens=[{"request_id": 1, "token_ids": [1]}] * 2),
    "sampling that cannot be": draft_pb2.DraftFrame(
        opens=[{"request_id": 1, "token_ids": [1], "sampling": {"temperature": -1}}]
    ),
    "an empty commit": draft_pb2.DraftFrame(commits=[{"request_id": 1}]),
    "a token outside the vocabulary": draft_pb2.DraftFrame(commits=[{"request_id": 1, "token_ids": [VOCABULARY]}]),
    "hidden states nobody asked for": draft_pb2.DraftFrame(
        contexts=[{"request_id": 1, "hidden_states": {"dtype": 1, "shape": [1, 1, 1], "data": bytes(4)}}]
    ),
    "a tensor too short": draft_pb2.DraftFrame(
        contexts=[{"request_id": 1, "hidden_states": {"dtype": 1, "shape": [1, 1, 2], "data": bytes(4)}}]
    ),
    "a tensor of nothing": draft_pb2.DraftFrame(
        contexts=[{"request_id": 1, "hidden_states": {"dtype": 1, "shape": [0, 2**32 - 1, 2**32 - 1]}}]
    ),
    "a tensor of no known type": draft_pb2.DraftFrame(
        contexts=[{"request_id": 1, "hidden_states": {"dtype": 9, "shape": [1, 1, 1], "data": bytes(4)}}]
    ),
}


@pytest.mark.parametrize("bad", BAD_FRAMES, ids=list(BAD_FRAMES))
async def test_a_bad_target_is_turned_away_alone(bad: str) -> None:
    async with draft_worker() as worker, target() as here, grpc.aio.insecure_channel(worker.address) as channel:
        await open_at(here, 1, worker.address)
        await here.poll(lambda news: len(nodes(news, 1)) == 3)
        call = draft_pb2_grpc.DraftServiceStub(channel).Grow()
        await call.write(BAD_FRAMES[bad])
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details()
        here.drafting.commit(Commit(1, 2, [8], 1))
        here.drafting.flush()
        assert nodes(await here.poll(lambda news: bool(news.growths)), 1) == [11]
        assert worker.servicer.open_requests == 1


async def test_a_failing_speculator_ends_the_loop() -> None:
    """A bug is no `DraftError`: the worker's compute ends with it, for its process to report and be restarted."""

    class Broken(Counting):
        tried = False

        def grow(self) -> Any:
            self.tried = True
            raise ZeroDivisionError

    async def serve() -> None:
        broken = Broken()
        async with draft_worker(broken) as worker, target() as here:
            await open_at(here, 1, worker.address)
            await until(lambda: broken.tried)

    with pytest.raises(ZeroDivisionError):
        await serve()


async def open_at(here: Target, request_id: int, address: str, max_depth: int = 3) -> None:
    await here.reach(address)
    assert here.drafting.open(opening(request_id, max_depth=max_depth), [address]) is not None
    here.drafting.flush()


@asynccontextmanager
async def lying(servicer: Liar) -> AsyncIterator[str]:
    """A server that can also send what is no message at all."""
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe,
            draft_pb2.DraftServiceDescribeRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
        "Grow": grpc.stream_stream_rpc_method_handler(
            servicer.Grow, draft_pb2.DraftFrame.FromString, lambda message: message.SerializeToString()
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.v1.DraftService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def draft_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "paceline_services.draft", "--worker-id", "killed", "--speculative-config", '{"method": "ngram"}'),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            while b"ready on" not in (line := await process.stderr.readline()):
                assert line, "the worker ended before it was ready"
        yield process, line.decode().split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.stderr.read()  # its compute ends a moment later
        await process.wait()


class Counted:
    """An observer that adds up."""

    def __init__(self) -> None:
        self.bytes_sent = self.bytes_received = 0
        self.round_trips: list[float] = []

    def sent(self, size: int) -> None:
        self.bytes_sent += size

    def received(self, size: int) -> None:
        self.bytes_received += size

    def round_trip(self, seconds: float) -> None:
        self.round_trips.append(seconds)


async def test_what_passes_over_a_link_is_counted() -> None:
    """Two frames there, each answered once; a round trip is no shorter than what the network takes."""
    seen = Counted()
    async with draft_worker() as worker:
        host, _, port = worker.address.rpartition(":")
        with ImpairmentProxy((host, int(port)), Impairment(delay_s=0.02)) as link:
            async with target(observer=seen) as here:
                await open_at(here, 1, link.address)
                await here.poll(lambda news: len(nodes(news, 1)) == 3)
                here.drafting.commit(Commit(1, 2, [9], 0))
                here.drafting.flush()
                await until(lambda: len(seen.round_trips) == 2)
            assert min(seen.round_trips) >= 0.04
            assert 0 < seen.bytes_sent < link.traffic.there
            assert 0 < seen.bytes_received < link.traffic.back
