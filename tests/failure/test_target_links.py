"""When the link to a target breaks, every request on it says so, once, and says what is known."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.link_errors import TargetLost
from paceline.wire.target_link import TargetLink
from tests.helpers.targets import NEVER_ENDS, TARGET_SERVICE, collect, linked, submission, target_worker

Frame = target_pb2.DeltaFrame
Delta = target_pb2.DeltaFrame.Delta


async def test_every_open_request_hears_of_a_lost_target() -> None:
    """And not one that had ended before."""
    async with target_worker() as worker, linked(worker) as [link]:
        await collect(link, submission("ended"))
        streams = [link.submit(submission(str(i), max_tokens=NEVER_ENDS)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await worker.server.stop()
        lost = await asyncio.gather(*(drain(stream) for stream in streams))
        assert all("lost: " in reason for reason in lost)
        assert link.lost
        with pytest.raises(TargetLost):
            await anext(link.submit(submission("late")))


async def drain(stream: AsyncIterator[Any]) -> str:
    """Why the stream broke."""
    with pytest.raises(TargetLost) as caught:
        async for _ in stream:
            pass
    return str(caught.value)


class Liar(target_pb2_grpc.TargetServiceServicer):
    """Answers the first submit with whatever the test wants."""

    def __init__(self, answer: Frame | None) -> None:
        self._answer = answer

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:  # noqa: N802
        return target_pb2.TargetServiceDescribeResponse(worker_id="liar")

    async def Serve(self, incoming: Any, context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        async for _ in incoming:
            if self._answer is None:
                return
            yield self._answer


LIES: dict[str, tuple[Frame | None, str]] = {
    "fewer marks than tokens": (
        Frame(deltas=[Delta(request_id="r", token_ids=[1, 2], accepted=[True])]),
        "broke the contract: accepted: 1 entries for 2 tokens",
    ),
    "fewer log-probs than tokens": (
        Frame(deltas=[Delta(request_id="r", token_ids=[1, 2], accepted=[True, False], log_probs=[{}])]),
        "broke the contract: log_probs: 1 entries for 2 tokens",
    ),
    "an end nobody knows": (
        Frame(deltas=[{"request_id": "r", "finish_reason": 77}]),  # type: ignore[list-item]
        "broke the contract: finish_reason: 77 is unknown",
    ),
    "hanging up": (None, "the target ended the link"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_target_that_breaks_the_contract_is_lost(lie: str) -> None:
    answer, reason = LIES[lie]
    async with serving(Liar(answer)) as address, link_to(address) as link:
        assert reason in await drain(link.submit(submission()))


async def test_news_of_requests_nobody_has_are_ignored() -> None:
    """They were cancelled here a moment ago."""
    good = Frame(
        deltas=[
            Delta(request_id="gone", finish_reason="FINISH_REASON_LENGTH"),
            Delta(request_id="r", token_ids=[7], accepted=[False], finish_reason="FINISH_REASON_STOP"),
        ]
    )
    async with serving(Liar(good)) as address, link_to(address) as link:
        tokens, _ = await collect(link, submission())
        assert tokens == [7]


@asynccontextmanager
async def link_to(address: str) -> AsyncIterator[TargetLink]:
    link = TargetLink(address)
    await link.connect()
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def serving(servicer: target_pb2_grpc.TargetServiceServicer) -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0)
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
