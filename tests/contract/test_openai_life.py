"""What happens to running requests when a client, a target or the gateway itself goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import openai
import pytest

from paceline.messages import Delta, GenerationRequest
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.wire.link_errors import NotSubmitted
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.generation.failover import MAX_TARGET_LOSSES
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
from tests.helpers.waiting import until

LONG: dict[str, Any] = {"seed": 7, "max_tokens": 60}


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def held(stack: Stack, *, begun: bool) -> asyncio.Task[httpx.Response]:
    """A completion that its target holds, after some tokens or before any."""
    decoder = stack.decoder
    if begun:
        decoder.hold_after = 4
    else:
        decoder.gate.clear()
    asking = await stack.begin(**LONG)
    await until(lambda: not decoder.gate.is_set())
    return asking


async def test_a_client_that_leaves_a_stream_frees_everything() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 2
        async with stack.streaming(**LONG) as events:
            await anext(events)
        await stack.decoder.cancelled.get()
        await stack.idle()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}], ids=["whole", "stream", "choices"])
async def test_a_client_that_leaves_before_the_first_token_frees_everything(fields: dict[str, Any]) -> None:
    async with open_stack(counts) as stack:
        stack.decoder.gate.clear()
        asking = await stack.begin(**LONG, **fields)
        asking.cancel()
        for _ in range(fields.get("n", 1)):
            await stack.decoder.cancelled.get()
        await stack.idle()


async def test_a_lost_target_is_a_pause_and_no_more() -> None:
    """The other target gets prompt, seed and what was committed, and the stream goes on as if nothing had been."""
    async with open_stack(counts, burst=2) as stack:
        expected = await stack.text(**LONG)
        stack.decoder.hold_after = 4
        async with stack.streaming(**LONG) as events:
            received = [await anext(events) for _ in range(4)]
            await stack.targets[0].die()
            await stack.store.registry.deregister(stack.targets[0].record)
            second = await stack.add_target(counts)
            received += [event async for event in events]
        assert text_of(received) == expected
        assert received[-1]["choices"][0]["finish_reason"] == "length"
        [resumed] = second.decoder.requests
        assert list(resumed.committed) == counts(resumed)[:8]
        assert resumed.sampling == stack.decoder.requests[-1].sampling
        assert 'paceline_replays_total{model_name="pydoc"} 1.0' in await stack.metrics()


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
        await until(lambda: any(target.load.other_requests for target in stack.model.fleet.targets.values()))
        await first.die()
        assert (await asking).status_code == 200
        chosen = busy_one if begun else idle_one
        assert stack.served[1:] == [not begun, begun]
        assert bool(chosen.decoder.requests[0].committed) == begun
        assert "tokens may differ" not in caplog.text
        assert "paceline_replays_other_numerics_total{" not in await stack.metrics()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_request_with_tokens_goes_on_with_other_numerics_if_there_is_no_choice(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning. A request without tokens may go to any target, without a warning."""
    async with open_stack(burst=2) as stack:
        first = await stack.add_target(counts, numerics="avx512")
        expected = await stack.text(**LONG)
        asking = await held(stack, begun=begun)
        older = await stack.add_target(counts)  # which does not say
        await first.die()
        assert (await asking).json()["choices"][0]["text"] == expected
        [resumed] = older.decoder.requests
        warnings = [each.getMessage() for each in caplog.records if "tokens may differ" in each.getMessage()]
        counted = 'paceline_replays_other_numerics_total{model_name="pydoc"} 1.0' in await stack.metrics()
        assert (len(warnings), counted) == (begun, begun)
        for line in warnings:
            assert resumed.request_id.partition("/")[2] in line
            assert line.endswith("drawn by (avx512) so far, by (an unknown worker version) from now on")


async def test_a_request_that_goes_on_may_lose_any_number_of_targets() -> None:
    """A past bug: a long request that drew tokens at each of them ended with an error at the fifth loss."""
    async with open_stack(counts, burst=1) as stack:
        expected = await stack.text(**LONG)
        stack.decoder.hold_after = 1
        async with stack.streaming(**LONG) as events:
            received = []
            for number in range(MAX_TARGET_LOSSES + 2):
                received.append(await anext(events))
                following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
                following.decoder.hold_after = 1
                await stack.targets[-2].die()
            following.decoder.hold_after = None
            following.decoder.gate.set()
            received += [event async for event in events]
        assert text_of(received) == expected


@pytest.mark.parametrize("lost", [False, True], ids=["handed over", "lost"])
async def test_a_request_is_handed_over_any_number_of_times_but_not_lost_with_too_many_targets(lost: bool) -> None:
    """It may be what kills them. A past bug: one that was handed over five times ended with an error, too."""
    async with open_stack(counts, burst=1) as stack:
        expected = await stack.text(**LONG)
        asking = await held(stack, begun=False)
        for number in range(MAX_TARGET_LOSSES + (1 if lost else 2)):
            leaving = stack.targets[-1]
            await until(lambda: stack.targets[-1].decoder.requests)
            following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
            following.decoder.gate.clear()
            await (leaving.die() if lost else leaving.decoder.hand_over())
        following.decoder.gate.set()
        answer = await asking
        if lost:
            assert answer.status_code == 500
            assert f"{MAX_TARGET_LOSSES + 1} targets were lost" in answer.text
            assert f'paceline_replays_total{{model_name="pydoc"}} {MAX_TARGET_LOSSES:.1f}' in await stack.metrics()
        else:
            assert answer.json()["choices"][0]["text"] == expected


async def test_a_target_that_left_before_it_was_asked_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    left, submit = MAX_TARGET_LOSSES + 1, TargetLink.submit

    def submit_late(link: TargetLink, request: GenerationRequest) -> AsyncGenerator[Delta]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise NotSubmitted("the target left")
        return submit(link, request)

    monkeypatch.setattr(TargetLink, "submit", submit_late)
    async with open_stack(counts) as stack:
        await stack.text(**LONG)
        assert left < 0
        assert "paceline_replays_total{" not in await stack.metrics()


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
        expected = await stack.text(**LONG)
        stack.decoder.gate.clear()
        neighbours = [await stack.begin(**LONG) for _ in range(3)]
        asking = await stack.begin(poison, max_tokens=5)
        await until(lambda: killed)
        await stack.targets[0].die()
        monkeypatch.setattr(ScriptedDecoder, "first_after_s", 0.05)
        for number in (1, 2):
            await stack.add_target(script, burst=1, worker_id=f"following-{number}")
        answer = await asking
        assert (answer.status_code, killed) == (500, 2)
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["message"] == "2 engines died while they served this request: it may be why"
        for neighbour in neighbours:
            assert (await neighbour).json()["choices"][0]["text"] == expected


async def test_engine_deaths_count_only_without_a_token_between_them() -> None:
    """A long request may outlive many engines that other requests kill."""
    async with open_stack(counts, burst=1) as stack:
        expected = await stack.text(**LONG)
        asking = await held(stack, begun=True)
        for number in range(3):
            dying = stack.targets[-1].decoder
            await until(lambda: not stack.targets[-1].decoder.gate.is_set())
            following = await stack.add_target(counts, burst=1, worker_id=f"following-{number}")
            following.decoder.hold_after = 4 if number < 2 else None
            await dying.die()
        assert (await asking).json()["choices"][0]["text"] == expected


async def test_no_other_target_is_an_error_of_the_stream() -> None:
    async with open_stack(counts, burst=1, limits=AdmissionLimits(resume_s=0.1)) as stack:
        stack.decoder.hold_after = 2
        stream = await stack.client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=60)
        await stack.targets[0].die()
        with pytest.raises(openai.APIError, match="no target came within"):
            async for _ in stream:
                pass
        await stack.idle()


async def test_health_follows_the_targets() -> None:
    async with open_stack() as stack:
        assert (await stack.http.get("/health")).status_code == 503
        target = await stack.add_target(counts)
        assert (await stack.http.get("/health")).status_code == 200
        await target.die()
        await until(lambda: not stack.model.fleet.has_target())
        assert (await stack.http.get("/health")).status_code == 503


async def test_a_target_with_another_vocabulary_is_not_used_until_it_is_started_anew_as_it_should_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under the same name, at the same address, and listed all the time; the same complaint is made once."""
    async with open_stack() as stack:
        port = 0
        for _ in range(2):
            wrong = await start_target(counts, 1, "stranger", fingerprint="another", port=port)
            port = int(wrong.record.address.rsplit(":", 1)[1])
            await stack.store.registry.register(wrong.record)
            while not wrong.linked:
                await asyncio.sleep(0.01)
            assert not stack.model.fleet.has_target()
            await wrong.die()
        right = await start_target(counts, 1, "stranger", port=port)
        assert right.record.address == wrong.record.address
        assert await stack.model.fleet.wait_for_target(10.0)
        assert caplog.text.count("its vocabulary differs") == 1
        await right.die()


async def test_a_gateway_that_drains_finishes_its_streams_and_takes_no_more() -> None:
    async with open_stack(counts, burst=1) as stack:
        expected = await stack.text(**LONG)
        asking = await held(stack, begun=False)
        draining = asyncio.create_task(stack.model.capacity.drain(10.0))
        await until(lambda: stack.model.capacity.closing)
        refused = await stack.complete(**LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await stack.http.get("/health")).status_code == 503
        assert not draining.done()
        stack.decoder.gate.set()
        assert (await asking).json()["choices"][0]["text"] == expected
        await draining


async def test_the_loss_of_redis_disturbs_no_request() -> None:
    """Running and new requests go on, without it and with one that has forgotten everything."""
    with EmbeddedRedis() as redis:
        async with open_stack(counts, burst=1, redis_url=redis.url) as stack:
            expected = await stack.text(**LONG)
            stack.decoder.hold_after = 2
            async with stack.streaming(**LONG) as events:
                received = [await anext(events)]
                redis.kill()
                await until(lambda: stack.store.presence.unavailable)
                stack.decoder.gate.set()
                received += [event async for event in events]
            assert text_of(received) == expected
            assert await stack.text(**LONG) == expected
            redis.start()
            await until(lambda: not stack.store.presence.unavailable)
            assert await stack.text(**LONG) == expected


async def test_a_slow_reader_gets_everything() -> None:
    """Its stream fills the socket's buffers; nothing may be lost or dropped."""
    async with open_stack(text_script("x" * 60_000), burst=1) as stack:
        async with httpx.AsyncClient(base_url=stack.http.base_url, timeout=20.0) as http:
            body = {"prompt": "x", "max_tokens": 60, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                await stack.idle()
                raw = (await response.aread()).decode()
        assert raw.count("data: {") == 61
