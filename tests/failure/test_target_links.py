"""When the link to a target breaks, every open request on it raises `TargetLost` once, with the reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.wire import target_link
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.link_errors import NotSubmitted, TargetLost
from tests.helpers.targets import (
    NEVER_ENDS,
    TARGET_SERVICE,
    collect,
    generation_request,
    link_to,
    linked,
    target_worker,
)

Frame = target_pb2.DeltaFrame
Delta = target_pb2.DeltaFrame.Delta


async def loss(stream: AsyncIterator[Any]) -> str:
    """Return why the stream broke."""
    with pytest.raises(TargetLost) as error:
        async for _ in stream:
            pass
    return str(error.value)


async def test_every_open_request_raises_when_the_target_is_lost() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        await collect(link, generation_request("ended"))
        streams = [link.submit(generation_request(str(i), max_tokens=NEVER_ENDS)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await worker.server.stop()
        reasons = await asyncio.gather(*map(loss, streams))
        assert all("lost: " in reason for reason in reasons)
        assert link.lost
        with pytest.raises(NotSubmitted):
            await anext(link.submit(generation_request("late")))


class Liar(target_pb2_grpc.TargetServiceServicer):
    """Takes requests, but answers the first submit with this frame, or ends the stream."""

    def __init__(self, answer: Frame | None) -> None:
        self._answer = answer

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:  # noqa: N802
        return target_pb2.TargetServiceDescribeResponse(worker_id="liar")

    async def Serve(self, incoming: Any, context: Any) -> AsyncIterator[Frame]:  # noqa: N802
        yield Frame()
        async for _ in incoming:
            if self._answer is None:
                return
            yield self._answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Delta(token_ids=[1, 2], accepted=[True]), "broke the contract: accepted: 1 entries for 2 tokens"),
        (
            Delta(token_ids=[1, 2], accepted=[True, False], log_probs=[{}]),
            "broke the contract: log_probs: 1 entries for 2 tokens",
        ),
        (Delta(finish_reason=77), "broke the contract: finish_reason: 77 is unknown"),  # type: ignore[arg-type]
        (None, "the target ended the link"),
    ],
)
async def test_a_target_that_breaks_the_contract_is_lost(answer: Delta | None, reason: str) -> None:
    if answer is not None:
        answer.request_id = "r"
    frame = Frame(deltas=[answer]) if answer is not None else None
    async with serving(Liar(frame)) as address, link_to(address) as link:
        assert reason in await loss(link.submit(generation_request()))


async def test_a_failure_of_this_end_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_link, "decode_delta", {}.__getitem__)
    async with serving(Liar(Frame(deltas=[Delta(request_id="r")]))) as address, link_to(address) as link:
        assert "lost: this end failed: TypeError" in await loss(link.submit(generation_request()))


async def test_deltas_of_unknown_requests_are_ignored() -> None:
    """They have just been cancelled."""
    frame = Frame(
        deltas=[
            Delta(request_id="cancelled", finish_reason="FINISH_REASON_LENGTH"),
            Delta(request_id="r", token_ids=[7], accepted=[False], finish_reason="FINISH_REASON_STOP"),
        ]
    )
    async with serving(Liar(frame)) as address, link_to(address) as link:
        tokens, _ = await collect(link, generation_request())
        assert tokens == [7]


@asynccontextmanager
async def serving(servicer: target_pb2_grpc.TargetServiceServicer) -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0)
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
