"""Whatever a draft worker does, its requests are reported lost once, and other links are not affected."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.cli.process_tree import process_and_descendants
from paceline.engine.draft_client import PollResult
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.draft_codec import MAX_NODES
from paceline.wire.node_codec import PackedNodes, pack_nodes
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from tests.helpers.service_processes import service_process
from tests.helpers.targets import collect, generation_request, link_to
from tests.helpers.waiting import PATIENCE_S, until
from tests.helpers.workers import VOCABULARY, Counting, LinkTraffic, draft_worker, host_and_port, nodes, opening, target

Frame = draft_pb2.GrowthFrame
Growth = draft_pb2.GrowthFrame.Growth


Answer = Callable[[draft_pb2.DraftFrame], Frame]


class Liar(draft_pb2_grpc.DraftServiceServicer):
    """Describes itself as compatible, and answers each frame with whatever the test wants."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.ended = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DraftServiceDescribeResponse:  # noqa: N802
        return draft_pb2.DraftServiceDescribeResponse(worker_id="liar", method="custom")

    async def Grow(self, incoming: AsyncIterator[draft_pb2.DraftFrame], context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        try:
            async for frame in incoming:
                yield self._answer(frame)
        finally:
            self.ended.set()


def packed(tokens: list[int], distances: list[int]) -> bytes:
    return pack_nodes(PackedNodes(tokens, distances, [-0.5] * len(tokens)))


def growth_with(**changes: Any) -> Answer:
    """Answer with a valid growth, except for these fields."""

    def answer(frame: draft_pb2.DraftFrame) -> Frame:
        fields = {
            "request_id": frame.opens[0].request_id,
            "base_position": 2,
            "first_node_id": 1,
            "nodes": packed([8, 9], [0, 1]),
        }
        return Frame(growths=[Growth(**{**fields, **changes})], applied=1)

    return answer


def dropping(frame: draft_pb2.DraftFrame) -> Frame:
    return Frame(dropped=[Frame.Dropped(request_id=frame.opens[0].request_id)], applied=1)


class Raw:
    """What is sent in the place of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._data


LIES = {
    "no widths": growth_with(nodes=b""),
    "a width of no bits": growth_with(nodes=bytes(8)),
    "half a node": growth_with(nodes=packed([8, 9], [0, 1])[:-1]),
    "padding that is not 0": growth_with(nodes=packed([8, 9], [0, 1])[:-1] + b"\xff"),
    "node 0": growth_with(first_node_id=0),
    "a parent before all nodes": growth_with(nodes=packed([8, 9], [0, 2])),
    "position beyond any context": growth_with(base_position=2**31),
    "too many nodes": growth_with(nodes=packed([1] * (MAX_NODES + 1), [0] * (MAX_NODES + 1))),
    "more nodes than a tree may have": lambda frame: Frame(growths=list(growth_with()(frame).growths) * 5, applied=1),
    "a request that was never opened": growth_with(request_id=99),
    "request 0": growth_with(request_id=0),
    "drops what was never opened": lambda frame: Frame(dropped=[Frame.Dropped(request_id=99)], applied=1),
    "applied more than was sent": lambda frame: Frame(applied=2),
    "a frame over the limit": growth_with(draft_laws=[{"token_steps": [1] * 2 * 2**20}]),
    "not a message": lambda frame: Raw(b"\xff\xff\xff"),  # type: ignore[dict-item]
}


async def test_a_valid_growth_is_accepted() -> None:
    """The lies are made from it."""
    async with lying(Liar(growth_with())) as address, target() as here:
        await here.open(1, address)
        assert await here.drafted(1, 2) == [8, 9]


async def test_a_guess_of_a_token_that_the_target_has_not_is_no_lie() -> None:
    """A draft's matrices may be padded to more tokens. The engine leaves such a growth out."""
    async with lying(Liar(growth_with(nodes=packed([8, VOCABULARY], [0, 1])))) as address, target() as here:
        await here.open(1, address)
        assert await here.drafted(1, 2) == [8, VOCABULARY]
        assert here.connected == [address]


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_closes_its_link_only(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    servicer = Liar(LIES[lie])
    async with lying(servicer) as address, draft_worker() as honest, target() as here:
        await here.open(1, honest.address)
        await here.open(2, address)
        updates = await here.poll(lambda updates: bool(updates.lost) and len(nodes(updates, 1)) == 3)
        await asyncio.wait_for(servicer.ended.wait(), 10)
        assert updates.lost == [2]
        assert nodes(updates, 2) == []
        assert f"draft {address}" in caplog.text
        here.commit(1, 2, [8, 9], 1)
        assert (await here.drafted(1, 1))[0] == 11
        assert here.drafting.open(opening(2), [honest.address]) == "one"


class Flood(Liar):
    """Repeats its answer to the first frame as fast as the link takes it, after `first`."""

    def __init__(self, answer: Answer, *first: Answer) -> None:
        super().__init__(answer)
        self._first = first
        self.frames = 0

    async def Grow(self, incoming: AsyncIterator[draft_pb2.DraftFrame], context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        try:
            frame = await anext(incoming)
            for each in self._first:
                yield each(frame)
            answer = self._answer(frame)
            while True:
                self.frames += 1
                yield answer
        finally:
            self.ended.set()


FLOODS = {"nothing": lambda frame: Frame(applied=1), "growth": growth_with(), "drops": dropping}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_useless_frames_closes_the_link(flood: str) -> None:
    """Each frame is cheap to send, costs the target time, and is valid by itself."""
    servicer = Flood(FLOODS[flood], dropping)
    async with lying(servicer) as address, target() as here:
        await here.open(1, address)
        assert await here.lost() == [1]
        await asyncio.wait_for(servicer.ended.wait(), 10)
        assert servicer.frames < 100_000, "only frames that were under way when the link closed"


@pytest.mark.parametrize(
    ("size", "all_mb"),
    [pytest.param(10**6, 1000, marks=pytest.mark.slow), (48 * 10**6, 200)],
    ids=["endless", "huge"],
)
async def test_a_flood_of_large_frames_costs_neither_memory_nor_tokens(size: int, all_mb: int) -> None:
    """Below the size limit of a frame, and far above it. The link is closed."""
    flood = Flood(heavy(size))
    drafted = '{"method": "draft_model", "model": "table:1000", "row_budget": false}'
    with service_process("target", "--model", "table:1000", "--speculative-config", drafted) as running:
        async with link_to(running.address) as link, lying(flood) as draft:
            expected, _ = await collect(link, generation_request("plain", max_tokens=1500, plain=True))
            before = peaks_mb(running.process.pid)
            number = 0
            async with asyncio.timeout(PATIENCE_S):
                while flood.frames * size < all_mb * 10**6 or not flood.ended.is_set():
                    number += 1
                    tokens, _ = await collect(
                        link, generation_request(str(number), max_tokens=1500, draft_addresses=[draft])
                    )
                    assert tokens == expected
            grown = [now - then for then, now in zip(before, peaks_mb(running.process.pid), strict=True)]
            assert max(grown) < 150, "a few frames in flight, and decoding them"


def heavy(size: int) -> Answer:
    """Answer with a valid growth, and so many more bytes in an unknown field."""
    valid = growth_with(base_position=0, nodes=packed([7], [0]))
    length = [size >> 7 * i & 127 | 128 for i in range(3)] + [size >> 21]  # a varint of four bytes
    more = b"\x7a" + bytes(length) + bytes(size)
    return lambda frame: Raw(valid(frame).SerializeToString() + more)  # type: ignore[return-value]


def peaks_mb(pid: int) -> list[float]:
    """The peak memory of a process and its descendants."""
    statuses = [Path(f"/proc/{each}/status").read_text() for each in process_and_descendants(pid)]
    return [int(peak) * 1024 / 10**6 for status in statuses for peak in re.findall(r"VmHWM:\s+(\d+) kB", status)]


async def test_a_worker_with_nothing_to_draft_is_kept() -> None:
    async with draft_worker() as worker, target(hang_s=0.05) as here:
        await here.open(1, worker.address, max_depth=0)
        await until(lambda: worker.servicer.open_requests == 1)
        assert await asyncio.to_thread(here.drafting.poll, 0.3) == PollResult()
        assert here.connected == [worker.address]


async def test_a_draining_worker_gives_its_requests_back(caplog: pytest.LogCaptureFixture) -> None:
    async with draft_worker() as leaving, draft_worker(worker_id="two") as staying, target() as here:
        await here.open(2, staying.address)
        await here.open(1, leaving.address)
        await here.drafted(1)
        leaving.servicer.drain()
        assert await here.lost() == [1]
        assert "this draft worker drains" in caplog.text
        await until(lambda: here.connected == [staying.address])
        assert here.drafting.open(opening(1), [leaving.address, staying.address]) == "two"


def states(request_id: int = 1, **tensor: Any) -> draft_pb2.DraftFrame:
    return draft_pb2.DraftFrame(contexts=[{"request_id": request_id, "hidden_states": tensor}])


BAD_FRAMES = {
    "no tokens": draft_pb2.DraftFrame(opens=[{"request_id": 1}]),
    "an id used twice": draft_pb2.DraftFrame(opens=[{"request_id": 1, "token_ids": [1]}] * 2),
    "invalid sampling": draft_pb2.DraftFrame(
        opens=[{"request_id": 1, "token_ids": [1], "sampling": {"temperature": -1}}]
    ),
    "an empty commit": draft_pb2.DraftFrame(commits=[{"request_id": 1}]),
    "unwanted hidden states": states(dtype=1, shape=[1, 1, 1], data=bytes(4)),
    "a tensor too short": states(dtype=1, shape=[1, 1, 2], data=bytes(4)),
    "an empty tensor": states(dtype=1, shape=[0, 2**32 - 1, 2**32 - 1]),
    "a tensor of an unknown type": states(dtype=9, shape=[1, 1, 1], data=bytes(4)),
}


@pytest.mark.parametrize("bad", BAD_FRAMES)
async def test_a_bad_frame_of_a_target_closes_its_link_only(bad: str) -> None:
    async with draft_worker() as worker, target() as here, grpc.aio.insecure_channel(worker.address) as channel:
        await here.open(1, worker.address)
        await here.drafted(1)
        call = draft_pb2_grpc.DraftServiceStub(channel).Grow()
        await call.write(BAD_FRAMES[bad])
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details()
        here.commit(1, 2, [8], 1)
        assert await here.drafted(1, 1) == [11]
        assert worker.servicer.open_requests == 1


@pytest.mark.parametrize("at", ["its opening", "a commit"])
async def test_a_token_that_the_draft_has_not_ends_drafts_of_its_request_alone(at: str) -> None:
    """A target's matrices may be padded to more tokens, and clients may send their ids."""
    async with draft_worker() as worker, target() as here:
        await here.open(1, worker.address)
        await here.drafted(1)
        padded = VOCABULARY if at == "its opening" else 8
        await here.open(2, worker.address, [7, padded])
        if at == "a commit":
            await here.drafted(2)
            here.commit(2, 1, [VOCABULARY], 1)
        await until(lambda: worker.servicer.open_requests == 1)
        here.commit(1, 2, [8], 1)
        assert await here.drafted(1, 1) == [11]
        assert here.connected == [worker.address]


async def test_an_error_in_a_speculator_ends_the_draft_loop() -> None:
    """Any error but `DraftError` is a bug: the model process exits and is restarted."""

    class Broken(Counting):
        tried = False

        def grow(self) -> Any:
            self.tried = True
            raise ZeroDivisionError

    async def serve() -> None:
        broken = Broken()
        async with draft_worker(broken) as worker, target() as here:
            await here.open(1, worker.address)
            await until(lambda: broken.tried)

    with pytest.raises(ZeroDivisionError):
        await serve()


async def test_the_traffic_of_a_link_is_counted() -> None:
    """Two frames are sent, and each is answered once. A round trip takes no less than the network's delay."""
    traffic = LinkTraffic()
    async with draft_worker() as worker:
        with ImpairmentProxy(host_and_port(worker.address), Impairment(delay_s=0.02)) as link:
            async with target(metrics=traffic) as here:
                await here.open(1, link.address)
                await here.drafted(1)
                here.commit(1, 2, [9], 0)
                await until(lambda: len(traffic.round_trips) == 2)
            assert min(traffic.round_trips) >= 0.04
            assert 0 < traffic.bytes_sent < link.traffic.there
            assert 0 < traffic.bytes_received < link.traffic.back


@asynccontextmanager
async def lying(servicer: Liar) -> AsyncIterator[str]:
    """A server that can also send bytes that are no message."""
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
