"""`TargetLink` against a real target over loopback."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.config import SamplingParams
from paceline.messages import FinishReason, GenerationRequest
from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.wire.link_errors import HandedOver, NotSubmitted, TargetLost, WireError
from paceline.wire.outbox import Outbox
from paceline.wire.target_codec import encode_request
from paceline.wire.target_link import TargetLink
from tests.helpers.targets import NEVER_ENDS, VOCABULARY, collect, generation_request, linked, target_worker
from tests.helpers.waiting import until


async def test_a_request_from_beginning_to_end() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        assert link.description.worker_id == "t"
        assert link.description.vocabulary_size == VOCABULARY
        async with aclosing(link.submit(generation_request())) as stream:
            *deltas, last = [delta async for delta in stream]
        assert sum(len(delta.tokens) for delta in (*deltas, last)) == 20
        assert sum(delta.speculation is not None for delta in deltas) < 5, "some have statistics"
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (12, 20)
        assert last.speculation is not None
        assert last.speculation.steps == 20
        assert last.timings.total_s > 0
        assert link.load is not None
        assert link.load.running == 0


async def test_request_ids_belong_to_a_link() -> None:
    """Two gateways use the same ids."""
    async with target_worker() as worker, linked(worker, worker) as [here, there]:
        results = await asyncio.gather(
            *(collect(link, generation_request(str(i))) for link in (here, there) for i in range(6))
        )
        assert all(tokens == results[0][0] for tokens, _ in results)


async def test_resuming_continues_exactly() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        whole, _ = await collect(link, generation_request())
        rest, last = await collect(link, generation_request("again", committed=whole[:7]))
        assert whole[:7] + rest == whole
        assert last.usage is not None
        assert last.usage.completion_tokens == 20


async def test_cancel_ends_with_a_last_delta() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        async with aclosing(link.submit(generation_request(max_tokens=NEVER_ENDS))) as deltas:
            await anext(deltas)
            link.cancel("r")
            *_, last = [delta async for delta in deltas]
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.usage is not None
        assert last.usage.completion_tokens < NEVER_ENDS
        assert not worker.servicer.busy


async def test_leaving_early_cancels() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        async with aclosing(link.submit(generation_request(max_tokens=NEVER_ENDS))) as deltas:
            await anext(deltas)
        await until(lambda: not worker.engine.busy)
        assert await collect(link, generation_request()), "the id can be used again"


async def test_closing_a_link_cancels_its_requests() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        deltas = link.submit(generation_request(max_tokens=NEVER_ENDS))
        await anext(deltas)
        await link.close()
        with pytest.raises(TargetLost):
            async for _ in deltas:
                pass
        with pytest.raises(NotSubmitted):
            await anext(link.submit(generation_request()))
        await until(lambda: not worker.servicer.busy and not worker.engine.busy)


async def test_a_link_that_a_request_congests_is_lost_with_that_request() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        link._outbox = Outbox(target_pb2.SubmitFrame, limit_bytes=1)
        with pytest.raises(TargetLost, match="wait to be sent"):
            await anext(link.submit(generation_request()))
        assert link.lost


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt": []}),
        ("vocabulary", {"prompt": [VOCABULARY]}),
        ("prompt", {"prompt": [1] * 5000}),
        ("sampling.top_p: ", {"sampling": SamplingParams.model_construct(top_p=1.5)}),
    ],
    ids=["the prompt is empty", "a token outside the vocabulary", "a prompt too long", "sampling out of range"],
)
async def test_an_invalid_request_ends_with_an_error_of_its_own(field: str, changes: dict[str, Any]) -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        good = asyncio.create_task(collect(link, generation_request("good")))
        tokens, last = await collect(link, replace(generation_request("bad"), **changes))
        assert tokens == []
        assert last.finish_reason is FinishReason.ERROR
        assert field in last.error
        assert len((await good)[0]) == 20


async def test_an_id_in_use_breaks_the_link() -> None:
    async with target_worker() as worker, grpc.aio.insecure_channel(worker.address) as channel:
        message = encode_request(generation_request(max_tokens=NEVER_ENDS))
        call = target_pb2_grpc.TargetServiceStub(channel).Serve()
        await call.write(target_pb2.SubmitFrame(submits=[message, message]))
        with pytest.raises(grpc.aio.AioRpcError, match="'r' is in use") as error:
            async for _ in call:
                pass
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not worker.servicer.busy)


async def test_a_value_that_does_not_fit_its_field_is_refused() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        with pytest.raises(WireError, match="request huge cannot be sent"):
            await anext(link.submit(GenerationRequest("huge", [2**32], SamplingParams())))
        assert len((await collect(link, generation_request()))[0]) == 20


async def test_connecting_to_no_target() -> None:
    link = TargetLink("127.0.0.1:9")
    with pytest.raises(TargetLost, match=r"target 127\.0\.0\.1:9 does not answer"):
        await link.connect(timeout_s=5.0)
    assert link.lost


async def test_a_draining_target_finishes_running_requests_and_hands_over_new_ones() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        running = asyncio.create_task(collect(link, generation_request("running", max_tokens=1000)))
        await until(lambda: bool(worker.requests.deltas))
        draining = asyncio.create_task(worker.servicer.drain(60, worker.engine_exited))
        await until(lambda: link.draining)
        with pytest.raises(HandedOver, match="handed the request over"):
            await collect(link, generation_request("late"))
        tokens, last = await running
        assert (len(tokens), last.finish_reason) == (1000, FinishReason.LENGTH)
        await draining
        await link.wait_lost()
        with pytest.raises(TargetLost, match=r"takes no requests: .*drains"):
            await TargetLink(worker.address).connect()


async def test_a_target_without_an_engine_takes_no_requests() -> None:
    """Its service still answers until it ends: a gateway that sent it requests would lose them again and again."""
    async with target_worker() as worker, linked(worker) as [link]:
        exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        exited.set_result(None)
        await worker.servicer.drain(60, exited)
        await link.wait_lost()
        with pytest.raises(TargetLost, match="takes no requests"):
            await TargetLink(worker.address).connect()


async def test_draining_has_a_timeout() -> None:
    async with target_worker() as worker, linked(worker) as [link]:
        running = asyncio.create_task(collect(link, generation_request(max_tokens=NEVER_ENDS)))
        await until(lambda: bool(worker.requests.deltas))
        await worker.servicer.drain(0.0, worker.engine_exited)
        with pytest.raises(HandedOver, match="handed the request over"):
            await running
        assert not worker.servicer.busy


async def test_health_and_reflection_know_the_services() -> None:
    """A draining server is not serving."""
    async with target_worker() as worker, grpc.aio.insecure_channel(worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await status("") == await status("paceline.v1.TargetService") == serving
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        assert {"paceline.v1.TargetService", "grpc.health.v1.Health"} <= names
        await worker.server.drain()
        assert await status("paceline.v1.TargetService") == health_pb2.HealthCheckResponse.NOT_SERVING
