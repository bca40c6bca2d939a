"""More requests than the limits admit: the rest is refused at once, the admitted ones are served as usual."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from threading import Event

import httpx
import pytest

from paceline.messages import FinishReason
from paceline.output_processor import TextDelta
from paceline.state import WorkerRecord
from paceline.wire import target_link
from paceline.wire.target_codec import encode_request
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.generation.deltas import interleaved
from paceline_services.gateway.server import running
from paceline_services.gateway.settings import GatewaySettings
from tests.helpers.memory_state import open_state
from tests.helpers.openai_stack import counts, open_stack
from tests.helpers.targets import target_worker
from tests.helpers.waiting import until

TIMED = "timed:vocabulary=512,step_ms=50"
"""A step much longer than its computation: the rest of it is a sleep, which the test replaces."""
SERVED = "tested"
"""The model name of `tests.helpers.targets`."""
QUEUE = 40


@asynccontextmanager
async def served(limits: AdmissionLimits, moving: Event) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway, a target and its engine over a slow model, which stands still unless `moving` is set."""
    spec = TimedModelConfig.parse(TIMED)

    def sleep(seconds: float) -> None:
        moving.wait()

    model = TimedModel(TIMED, spec, slots=512, max_model_len=256, sleep=sleep)
    async with (
        target_worker(model=model) as worker,
        open_state(ttl_s=3600.0) as store,
        running(GatewaySettings({SERVED: TIMED}, port=0, limits=limits), store) as (models, addresses),
    ):
        record = WorkerRecord("target", "t", worker.address, SERVED, "", spec.fingerprint, time.time())
        await store.registry.register(record)
        assert await models.first.fleet.wait_for_target(60.0)
        everybody = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=240.0, limits=everybody) as http:
            try:
                yield http
            finally:
                moving.set()


async def test_a_flood_is_served_up_to_the_limit_and_correctly() -> None:
    """Five times the limit at once, twice: the first flood leaves nothing behind.

    Requests are refused while the target stands still. The admitted ones need more slots than the target has.
    """
    moving = Event()
    moving.set()
    async with served(AdmissionLimits(max_queue=QUEUE), moving) as http:

        async def ask(number: int) -> httpx.Response:
            body = {"prompt": [100 + number, 7, 8, 9], "max_tokens": 12, "seed": number, "temperature": 0.8}
            return await http.post("/v1/completions", json=body | {"return_token_ids": True})

        alone = [(await ask(number)).json()["choices"][0]["token_ids"] for number in range(5)]
        for _ in range(2):
            moving.clear()
            asking = [asyncio.create_task(ask(number % 5)) for number in range(5 * QUEUE)]
            while sum(task.done() for task in asking) < 4 * QUEUE:
                await asyncio.sleep(0.01)
            refused = [task.result() for task in asking if task.done()]
            assert Counter(answer.status_code for answer in refused) == {429: 4 * QUEUE}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            moving.set()
            for number, answer in enumerate(await asyncio.gather(*asking)):
                if answer.status_code != 429:
                    assert answer.json()["choices"][0]["token_ids"] == alone[number % 5]
        metrics = (await http.get("/metrics")).text
        assert f'paceline_requests_queued{{model_name="{SERVED}"}} 0.0' in metrics
        assert f'paceline_rejections_total{{model_name="{SERVED}",reason="queue"}} {8 * QUEUE}.0' in metrics


async def test_a_full_queue_refuses_before_the_body_is_read() -> None:
    """The body of the refused request never ends."""
    async with open_stack(counts, limits=AdmissionLimits(max_queue=3)) as stack:
        stack.decoder.gate.clear()
        waiting = [await stack.begin(seed=3) for _ in range(3)]
        async with stack.connection() as (reader, writer):
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"prompt": "')
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1\r\n" in head
        assert not any(task.done() for task in waiting)
        assert 'paceline_requests_queued{model_name="pydoc"} 3.0' in await stack.metrics()
        stack.decoder.gate.set()
        assert len({(await task).json()["choices"][0]["text"] for task in waiting}) == 1
        assert (await stack.complete()).status_code == 200


async def test_a_burst_of_one_moment_does_not_slip_past_the_limit() -> None:
    """Every request passes the first check before any begins."""
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=4)) as stack:
        stack.decoder.gate.clear()
        asking = [asyncio.create_task(stack.complete()) for _ in range(12)]
        await until(lambda: sum(task.done() for task in asking) >= 8)
        assert len(stack.decoder.requests) <= 4
        stack.decoder.gate.set()
        assert Counter([(await task).status_code for task in asking]) == {200: 4, 429: 8}


async def test_a_queue_counts_choices() -> None:
    """A request larger than the queue is served if the queue is empty, and refused otherwise."""
    async with open_stack(counts, limits=AdmissionLimits(max_queue=4)) as stack:
        stack.decoder.gate.clear()
        one = await stack.begin(n=1)
        assert (await stack.complete(n=4)).status_code == 429
        three = await stack.begin(n=3)
        assert (await stack.complete(n=1)).status_code == 429
        stack.decoder.gate.set()
        assert [answer.status_code for answer in (await one, await three, await stack.complete(n=6))] == [200] * 3


async def test_choices_that_never_began_leave_no_trace() -> None:
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=4)) as stack:
        stack.decoder.gate.clear()
        asking = asyncio.create_task(stack.complete(n=4))
        while stack.model.queue.in_flight < 4:
            await asyncio.sleep(0)
        asking.cancel()
        await stack.idle()
        assert stack.model.capacity.in_flight == 0


async def test_other_tasks_run_while_many_completions_begin() -> None:
    """One takes a moment to begin, so a thousand at once would stop every stream."""
    turn, begun = 0, []

    async def other_task() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def completion() -> AsyncGenerator[TextDelta]:
        begun.append(turn)
        yield TextDelta("r", finish_reason=FinishReason.STOP)

    task = asyncio.create_task(other_task())
    assert len([each async for each in interleaved({index: completion() for index in range(10)})]) == 10
    task.cancel()
    assert len(set(begun)) == 10


async def test_large_requests_wait_for_a_link_and_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A past bug: a request of many completions broke the links to all targets, and with them every stream."""
    monkeypatch.setattr(target_link, "SUBMIT_FRAME_BYTES", 20_000)
    async with open_stack(counts, limits=AdmissionLimits(resume_s=0.1)) as stack:
        await stack.text(["x"] * 8, n=8, max_tokens=3, bad_words=["word " * 200])
        assert len(stack.decoder.requests) == 64
        assert sum(encode_request(each).ByteSize() for each in stack.decoder.requests) > 2 * 20_000
        [target] = stack.model.fleet.targets.values()
        assert not target.link.lost


async def test_a_request_larger_than_a_link_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_link, "SUBMIT_FRAME_BYTES", 2000)
    async with open_stack(counts, limits=AdmissionLimits(resume_s=0.1)) as stack:
        answer = await stack.complete(bad_words=["word " * 200] * 5)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "the most is 1000" in answer.text
        assert (await stack.complete()).status_code == 200
