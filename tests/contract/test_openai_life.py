"""What happens to running requests when a client, a target or the gateway itself goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from paceline.core.messages import GenerationRequest
from paceline.state.embedded_redis import EmbeddedRedis
from paceline_services.gateway.admission import AdmissionLimits
from paceline_services.gateway.failover import MAX_TARGET_LOSSES
from tests.helpers.openai_stack import (
    MODEL,
    TOKENIZER,
    KillsEngines,
    ScriptedDecoder,
    Stack,
    counts,
    open_stack,
    start_target,
    text_script,
)

LONG: dict[str, Any] = {"prompt": "x", "seed": 7, "max_tokens": 60}


@asynccontextmanager
async def streaming(stack: Stack, body: dict[str, Any] = LONG) -> AsyncIterator[AsyncIterator[Any]]:
    """The parsed events of a completion's stream, up to [DONE]."""
    async with stack.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()

        async def parsed() -> AsyncIterator[Any]:
            async with aclosing(response.aiter_lines()) as lines:
                async for line in lines:
                    if line.startswith("data: {"):
                        yield json.loads(line.removeprefix("data: "))

        yield parsed()


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def whole_text(stack: Stack, body: dict[str, Any] = LONG) -> str:
    answer = await stack.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def idle(stack: Stack) -> None:
    while stack.model.queue.in_flight or stack.model.fleet.in_flight:
        await asyncio.sleep(0.01)


async def test_a_client_that_leaves_a_stream_frees_everything() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 2
        async with streaming(stack) as events:
            await anext(events)
        await stack.decoder.cancelled.get()
        await idle(stack)


@pytest.mark.parametrize("body", [LONG, LONG | {"stream": True}, LONG | {"n": 3}])
async def test_a_client_that_leaves_before_the_first_token_frees_everything(body: dict[str, Any]) -> None:
    async with open_stack(counts) as stack:
        stack.decoder.gate.clear()
        asking = asyncio.create_task(stack.http.post("/v1/completions", json=body))
        while len(stack.decoder.requests) < body.get("n", 1):
            await asyncio.sleep(0.01)
        asking.cancel()
        for _ in range(body.get("n", 1)):
            await stack.decoder.cancelled.get()
        await idle(stack)


async def test_a_lost_target_is_a_pause_and_no_more() -> None:
    """The other target gets prompt, seed and what was committed, and the stream goes on as if nothing had been."""
    async with open_stack(counts, burst=2) as stack:
        expected = await whole_text(stack)
        stack.decoder.hold_after = 4
        async with streaming(stack) as events:
            received = [await anext(events) for _ in range(4)]
            await stack.targets[0].die()
            await stack.store.registry.deregister(stack.targets[0].record)
            second = await stack.add_target(counts)
            received += [event async for event in events]
        assert text_of(received) == expected
        assert received[-1]["choices"][0]["finish_reason"] == "length"
        resumed = second.decoder.requests[0]
        assert list(resumed.committed) == list(counts(resumed))[: len(resumed.committed)]
        assert len(resumed.committed) == 8
        assert resumed.sampling.seed == 7
        metrics = (await stack.http.get("/metrics")).text
        assert 'paceline_replays_total{model_name="pydoc"} 1.0' in metrics


@pytest.mark.parametrize("begun", [True, False])
async def test_a_request_with_tokens_goes_on_at_a_target_with_the_same_numerics_however_busy(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stack(burst=2) as stack:
        first = await stack.add_target(counts, numerics="avx512")
        asking = await held(stack, begun=begun)
        idle_one = await stack.add_target(counts, numerics="avx2")
        busy_one = await stack.add_target(counts, numerics="avx512")
        await stack.store.registry.heartbeat(busy_one.record, {"running": 1000.0, "beat": 1.0})
        while not any(target.load.other_requests for target in stack.model.fleet.targets.values()):
            await asyncio.sleep(0.01)
        await first.die()
        assert len((await asking).text)
        chosen = busy_one if begun else idle_one
        assert [len(each.decoder.requests) for each in (idle_one, busy_one)] == [not begun, begun]
        assert bool(chosen.decoder.requests[0].committed) == begun
        assert "tokens may differ" not in caplog.text
        assert "paceline_replays_other_numerics_total{" not in (await stack.http.get("/metrics")).text


@pytest.mark.parametrize("begun", [True, False])
async def test_a_request_with_tokens_goes_on_with_other_numerics_if_there_is_no_choice(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning. A request without tokens may go to any target, without a warning."""
    async with open_stack(burst=2) as stack:
        first = await stack.add_target(counts, numerics="avx512")
        expected = await whole_text(stack)
        asking = await held(stack, begun=begun)
        older = await stack.add_target(counts)  # which does not say
        await first.die()
        assert (await asking).json()["choices"][0]["text"] == expected
        [resumed] = older.decoder.requests
        warnings = [each.getMessage() for each in caplog.records if "tokens may differ" in each.getMessage()]
        counted = (await stack.http.get("/metrics")).text.count(
            'paceline_replays_other_numerics_total{model_name="pydoc"} 1.0'
        )
        assert (len(warnings), counted) == (begun, begun)
        for line in warnings:
            assert resumed.request_id.partition("/")[2] in line
            assert line.endswith("drawn by (avx512) so far, by (an unknown worker version) from now on")


async def held(stack: Stack, *, begun: bool) -> asyncio.Task[httpx.Response]:
    """A completion that its target holds, after some tokens or before any."""
    decoder, before = stack.decoder, len(stack.decoder.requests)
    if begun:
        decoder.hold_after = 4
    else:
        decoder.gate.clear()
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=LONG))
    while len(decoder.requests) == before or (begun and decoder.gate.is_set()):
        await asyncio.sleep(0.01)
    return asking


async def test_a_draining_target_hands_its_requests_over() -> None:
    async with open_stack(counts, counts, burst=2) as stack:
        expected = await whole_text(stack)
        for target in stack.targets:
            target.decoder.gate.clear()
        asking = asyncio.create_task(whole_text(stack))
        while not any(target.servicer._owners for target in stack.targets):
            await asyncio.sleep(0.01)
        busy = next(target for target in stack.targets if target.servicer._owners)
        await busy.servicer.drain(0.0, asyncio.get_running_loop().create_future())
        for target in stack.targets:
            target.decoder.gate.set()
        assert await asking == expected


async def test_a_request_may_be_handed_over_any_number_of_times() -> None:
    """It once ended with an error after five: as one that was on five targets when they died."""
    async with open_stack(counts, burst=1) as stack:
        expected = await whole_text(stack)
        stack.decoder.gate.clear()
        asking = asyncio.create_task(whole_text(stack))
        for number in range(MAX_TARGET_LOSSES + 2):
            leaving = stack.targets[-1]
            while not leaving.servicer._owners:
                await asyncio.sleep(0.01)
            following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
            following.decoder.gate.clear()
            await leaving.servicer.drain(0.0, asyncio.get_running_loop().create_future())
        following.decoder.gate.set()
        assert await asking == expected


async def test_a_request_that_was_on_many_lost_targets_ends() -> None:
    """It may be what kills them."""
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.gate.clear()
        asking = asyncio.create_task(stack.http.post("/v1/completions", json=LONG))
        for number in range(MAX_TARGET_LOSSES + 1):
            dying = stack.targets[-1]
            while not dying.servicer._owners:
                await asyncio.sleep(0.01)
            following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
            following.decoder.gate.clear()
            await dying.die()
        answer = await asking
        assert answer.status_code == 500
        assert f"{MAX_TARGET_LOSSES + 1} targets were lost" in answer.text


async def test_a_request_that_kills_engines_ends_and_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were on the first engine may be why it died. The second one dies with the one that is, and with no
    other that has not drawn a token there."""
    poison = "die"
    deadly, killed = TOKENIZER.encode(poison), 0

    def script(request: GenerationRequest) -> Sequence[int]:
        nonlocal killed
        if list(request.prompt) == deadly:
            killed += 1
            raise KillsEngines
        return counts(request)

    async with open_stack(script, burst=1) as stack:
        expected = await whole_text(stack)
        stack.decoder.gate.clear()
        before = len(stack.decoder.requests)
        neighbours = [asyncio.create_task(whole_text(stack)) for _ in range(3)]
        while len(stack.decoder.requests) < before + 3:
            await asyncio.sleep(0.01)
        asking = asyncio.create_task(stack.http.post("/v1/completions", json={"prompt": poison, "max_tokens": 5}))
        while not killed:
            await asyncio.sleep(0.01)
        await stack.targets[0].die()
        monkeypatch.setattr(ScriptedDecoder, "first_after_s", 0.05)
        for number in (1, 2):
            await stack.add_target(script, burst=1, worker_id=f"following-{number}")
        answer = await asking
        assert (answer.status_code, killed) == (500, 2)
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["message"] == "2 engines died while they served this request: it may be why"
        assert await asyncio.gather(*neighbours) == [expected] * 3


async def test_engine_deaths_count_only_without_a_token_between_them() -> None:
    """A long request may outlive many engines that other requests kill."""
    async with open_stack(counts, burst=1) as stack:
        expected = await whole_text(stack)
        asking = await held(stack, begun=True)
        for number in range(3):
            dying = stack.targets[-1]
            following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
            following.decoder.hold_after = 4 if number < 2 else None
            ended = asyncio.get_running_loop().create_future()
            ended.set_result(None)
            await dying.servicer.drain(0.0, ended)
            while number < 2 and following.decoder.gate.is_set():
                await asyncio.sleep(0.01)
        assert (await asking).json()["choices"][0]["text"] == expected


async def test_no_other_target_is_an_error_of_the_stream() -> None:
    async with open_stack(counts, burst=1, limits=AdmissionLimits(resume_s=0.1)) as stack:
        stack.decoder.hold_after = 2
        stream = await stack.client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=60)
        await stack.targets[0].die()
        with pytest.raises(openai.APIError, match="no other came within"):
            async for _ in stream:
                pass
        await idle(stack)


async def test_an_idle_connection_is_the_clients_to_close() -> None:
    """Clients keep theirs for 5 seconds, as uvicorn would; a request sent just then would fail."""
    async with open_stack(text_script("hello")) as stack:
        address = stack.http.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for wait_s in (6, 0):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            while await reader.readline() != b"\r\n":
                pass
            await asyncio.sleep(wait_s)
        writer.close()


async def test_health_follows_the_targets() -> None:
    async with open_stack() as stack:
        assert (await stack.http.get("/health")).status_code == 503
        target = await stack.add_target(text_script("hello"))
        assert (await stack.http.get("/health")).status_code == 200
        await target.die()
        while stack.model.fleet.available:
            await asyncio.sleep(0.01)
        assert (await stack.http.get("/health")).status_code == 503


async def test_a_target_with_another_vocabulary_or_model_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    async with open_stack() as stack:
        target = await start_target(text_script("hello"), 1, "stranger", fingerprint="another")
        await stack.store.registry.register(target.record)
        while "its vocabulary differs" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not stack.model.fleet.available
        await target.die()


async def test_a_target_that_was_not_used_is_used_once_it_is_started_anew_as_it_should_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under the same name, at the same address, and listed all the time; the same complaint is made once."""
    async with open_stack() as stack:
        port = 0
        for _ in range(2):
            wrong = await start_target(counts, 1, "stranger", fingerprint="another", port=port)
            port = int(wrong.record.address.rsplit(":", 1)[1])
            await stack.store.registry.register(wrong.record)
            while not wrong.servicer._links:
                await asyncio.sleep(0.01)
            await wrong.die()
        right = await start_target(counts, 1, "stranger", port=port)
        assert right.record.address == wrong.record.address
        assert await stack.model.fleet.wait_for_target(10.0)
        assert caplog.text.count("its vocabulary differs") == 1
        await right.die()


async def test_a_gateway_that_drains_finishes_its_streams_and_takes_no_more() -> None:
    async with open_stack(counts, burst=1) as stack:
        expected = await whole_text(stack)
        stack.decoder.gate.clear()
        asking = asyncio.create_task(whole_text(stack))
        while not stack.model.queue.in_flight:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(stack.model.capacity.drain(10.0))
        while not stack.model.capacity.closing:
            await asyncio.sleep(0)
        refused = await stack.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await stack.http.get("/health")).status_code == 503
        assert not draining.done()
        stack.decoder.gate.set()
        assert await asking == expected
        await draining


async def test_requests_that_begin_alike_go_to_one_target_and_load_spreads_the_rest() -> None:
    async with open_stack(counts, counts, counts) as stack:
        for _ in range(4):
            await whole_text(stack, {"prompt": "the same beginning", "max_tokens": 1})
        assert sorted(len(target.decoder.requests) for target in stack.targets) == [0, 0, 4]
        for target in stack.targets:
            target.decoder.gate.clear()
            target.decoder.requests.clear()
        asking = asyncio.create_task(whole_text(stack, {"prompt": "the same beginning", "n": 30, "max_tokens": 1}))
        while stack.model.fleet.in_flight < 30:
            await asyncio.sleep(0.01)
        while sum(len(target.decoder.requests) for target in stack.targets) < 30:
            await asyncio.sleep(0.01)
        assert all(len(target.decoder.requests) >= 7 for target in stack.targets)
        for target in stack.targets:
            target.decoder.gate.set()
        await asking


async def test_drafts_are_offered_in_turn_and_strangers_never() -> None:
    async with open_stack(counts) as stack:
        record = stack.targets[0].record
        for address, fingerprint in [("a:1", record.fingerprint), ("b:1", ""), ("c:1", "another")]:
            draft = type(record)("draft", address, address, "", "ngram", fingerprint, record.started_at)
            await stack.store.registry.register(draft)
        while len(stack.model.fleet.drafts.breakers) < 2:
            await asyncio.sleep(0.01)
        stack.decoder.requests.clear()
        for _ in range(4):
            await whole_text(stack, {"prompt": "x", "max_tokens": 1})
        drafts = [tuple(request.drafts) for request in stack.decoder.requests]
        assert set(drafts) == {("a:1", "b:1"), ("b:1", "a:1")}
        assert drafts[0] == drafts[2] != drafts[1] == drafts[3]


async def test_the_loss_of_redis_disturbs_no_request() -> None:
    """Running and new requests go on, without it and with one that has forgotten everything."""
    with EmbeddedRedis() as redis:
        async with open_stack(counts, burst=1, redis_url=redis.url) as stack:
            expected = await whole_text(stack)
            stack.decoder.hold_after = 2
            async with streaming(stack) as events:
                received = [await anext(events)]
                redis.kill()
                while not stack.store.presence.unavailable:
                    await asyncio.sleep(0.01)
                stack.decoder.gate.set()
                received += [event async for event in events]
            assert text_of(received) == expected
            assert await whole_text(stack) == expected
            redis.start()
            while stack.store.presence.unavailable:
                await asyncio.sleep(0.01)
            assert await whole_text(stack) == expected


async def test_a_slow_reader_gets_everything() -> None:
    """Its stream fills the socket's buffers; nothing may be lost or dropped."""
    async with open_stack(text_script("x" * 60_000), burst=1) as stack:
        async with httpx.AsyncClient(base_url=stack.http.base_url, timeout=20.0) as http:
            body = {"prompt": "x", "max_tokens": 60, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                await idle(stack)
                raw = (await response.aread()).decode()
        assert raw.count("data: {") == 61
