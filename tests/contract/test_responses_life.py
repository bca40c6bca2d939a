"""Responses that end early, that fail, and that are kept: for their client alone, and as long as Redis is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline.messages import GenerationRequest
from paceline.state import RecordLimits
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.openai_stack import MODEL, TOKENIZER, FailsAfter, Stack, counts, open_stack, text_script
from tests.helpers.waiting import until

RESPONSES = "/v1/responses"
TEXT = "json.dumps makes a str"


async def create(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"input": "What does json.dumps do?", **fields}
    return await stack.http.post(RESPONSES, json=body, headers=headers)


async def created(stack: Stack, **fields: Any) -> dict[str, Any]:
    """A response, which has to succeed."""
    answer = await create(stack, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@asynccontextmanager
async def streaming(stack: Stack, **fields: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events of a stream as they come."""
    async with stack.http.stream("POST", RESPONSES, json={"input": "x", "stream": True, **fields}) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        yield (json.loads(line.removeprefix("data: ")) async for line in lines if line.startswith("data: "))


async def test_a_client_sees_its_own_responses_only(tmp_path: Path) -> None:
    """For another client a response does not exist, and it cannot end one that runs."""
    names = ("alice", "bob")
    file = KeyFile(keys=tuple(ApiKey(name=name, sha256=digest(name)) for name in names))
    write(tmp_path / "keys.json", file)
    alice, bob = ({"authorization": f"Bearer {name}"} for name in names)
    async with open_stack(counts, burst=1, api_keys=tmp_path / "keys.json") as stack:
        mine = (await create(stack, alice, max_output_tokens=3)).json()["id"]
        assert (await stack.http.get(f"{RESPONSES}/{mine}", headers=alice)).status_code == 200
        for call in (
            stack.http.get(f"{RESPONSES}/{mine}", headers=bob),
            stack.http.get(f"{RESPONSES}/{mine}/input_items", headers=bob),
            stack.http.post(f"{RESPONSES}/{mine}/cancel", headers=bob),
            stack.http.delete(f"{RESPONSES}/{mine}", headers=bob),
            create(stack, bob, previous_response_id=mine),
        ):
            refused = await call
            unknown = refused.json()["error"]
            assert (refused.status_code, mine in unknown["message"]) == (404, True)
        stack.decoder.hold_after = 2
        asking = asyncio.create_task(create(stack, alice, max_output_tokens=60))
        await until(lambda: not stack.decoder.gate.is_set())
        running = f"resp_{stack.decoder.requests[-1].group}"
        assert (await stack.http.get(f"{RESPONSES}/{running}", headers=alice)).json()["status"] == "in_progress"
        assert (await stack.http.get(f"{RESPONSES}/{running}", headers=bob)).status_code == 404
        assert (await stack.http.post(f"{RESPONSES}/{running}/cancel", headers=bob)).status_code == 404
        stack.decoder.gate.set()
        assert (await asking).json()["status"] == "incomplete"
        assert (await create(stack, alice, previous_response_id=mine, max_output_tokens=3)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_response_is_cancelled_with_what_it_has(stream: bool) -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 4
        if stream:
            async with streaming(stack) as events:
                first = await anext(events)
                await until(lambda: not stack.decoder.gate.is_set())
                cancelled = await stack.client.responses.cancel(first["response"]["id"])
                *_, last = [event async for event in events]
            assert last["type"] == "response.incomplete"
            response = last["response"]
        else:
            asking = asyncio.create_task(created(stack))
            await until(lambda: not stack.decoder.gate.is_set())
            await stack.all_received()
            cancelled = await stack.client.responses.cancel(f"resp_{stack.decoder.requests[-1].group}")
            response = await asking
        await stack.decoder.cancelled.get()
        await stack.idle()
        assert cancelled.status == response["status"] == "cancelled"
        [item] = response["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", cancelled.output_text)
        assert response["usage"]["output_tokens"] in range(1, 5)
        again = await stack.client.responses.cancel(response["id"])
        assert again.status == "cancelled"
        stack.decoder.gate.set()
        finished = await created(stack, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await stack.client.responses.cancel(finished["id"])


async def test_a_client_that_leaves_a_stream_frees_everything() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 2
        async with streaming(stack) as events:
            response_id = (await anext(events))["response"]["id"]
        await stack.decoder.cancelled.get()
        await stack.idle()
        assert (await stack.http.get(f"{RESPONSES}/{response_id}")).status_code == 404


async def test_a_response_that_fails_after_it_began() -> None:
    """A stream says so in its last event; nothing is kept."""
    output = TOKENIZER.encode(TEXT)

    def script(request: GenerationRequest) -> Sequence[int]:
        raise FailsAfter("the cache is on fire", output)

    async with open_stack(script, burst=1) as stack:
        refused = await create(stack)
        assert (refused.status_code, refused.json()["error"]["message"]) == (500, "the cache is on fire")
        async with streaming(stack) as events:
            *_, item, last = [event async for event in events]
        assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "the cache is on fire"}
        assert (await stack.http.get(f"{RESPONSES}/{last['response']['id']}")).status_code == 404


async def test_without_redis_responses_go_on_and_say_that_they_are_not_kept() -> None:
    with EmbeddedRedis() as redis:
        async with open_stack(text_script(TEXT), redis_url=redis.url) as stack:
            before = await created(stack)
            assert before["store"]
            assert (await created(stack, previous_response_id=before["id"]))["store"]
            redis.kill()
            await until(lambda: stack.store.presence.unavailable)
            during = await created(stack)
            assert (during["output"][0]["content"][0]["text"], during["store"]) == (TEXT, False)
            refused = await create(stack, previous_response_id=before["id"])
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "response_store_unavailable")
            assert "Redis does not answer" in error["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert (await stack.http.get(f"{RESPONSES}/{before['id']}")).status_code == 503
            redis.start()
            await until(lambda: not stack.store.presence.unavailable)
            lost = await create(stack, previous_response_id=before["id"])
            assert (lost.status_code, lost.json()["error"]["code"]) == (404, "previous_response_not_found")
            assert (await created(stack))["store"]


async def test_a_gateway_that_keeps_no_responses() -> None:
    """`store: true` is accepted and has no effect."""
    async with open_stack(text_script(TEXT), records=RecordLimits(response_s=0)) as stack:
        response = await created(stack, store=True)
        assert not response["store"]
        for answer in (
            await create(stack, previous_response_id=response["id"]),
            await stack.http.get(f"{RESPONSES}/{response['id']}"),
            await stack.http.delete(f"{RESPONSES}/{response['id']}"),
        ):
            assert answer.status_code == 404
            assert "this server stores no responses" in answer.json()["error"]["message"]


async def test_a_second_gateway_continues_what_the_first_one_answered() -> None:
    with EmbeddedRedis() as redis:
        async with (
            open_stack(text_script(TEXT), redis_url=redis.url) as first,
            open_stack(text_script(TEXT), redis_url=redis.url) as second,
        ):
            response = await created(first)
            await created(second, input="And loads?", previous_response_id=response["id"])
            prompts = [TOKENIZER.decode(each.prompt) for each in (*first.decoder.requests, *second.decoder.requests)]
            assert any("json.dumps do" in each and TEXT in each and "And loads?" in each for each in prompts)


async def test_errors_before_the_first_token_are_ordinary_ones() -> None:
    async with open_stack() as stack:
        for stream in (False, True):
            assert (await create(stack, stream=stream)).status_code == 503
        unknown = await create(stack, model="gpt-4", stream=True)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert MODEL in unknown.text
