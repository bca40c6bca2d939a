"""Responses in the background: answered at once, read, followed and cancelled at any gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline.messages import GenerationRequest
from paceline.state import RecordLimits
from paceline.state.embedded_redis import EmbeddedRedis
from paceline_services.gateway.responses import background
from paceline_services.gateway.responses.history import ResponseHistory
from tests.helpers.openai_stack import MODEL, FailsAfter, Stack, another_gateway, counts, open_stack, text_script
from tests.helpers.waiting import eventually, until

RESPONSES = "/v1/responses"
TEXT = "json.dumps makes a str of an object"


@asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[Stack, Stack]]:
    """Two gateways with one Redis and one target."""
    with EmbeddedRedis() as redis:
        async with (
            open_stack(text_script(TEXT), redis_url=redis.url, burst=1) as first,
            another_gateway(first, redis.url) as second,
        ):
            yield first, second


async def begin(stack: Stack, **fields: Any) -> Any:
    return await stack.client.responses.create(model=MODEL, input="x", background=True, **fields)


async def ended(stack: Stack, response_id: str) -> Any:
    """The response when it is no longer under way."""

    async def over() -> bool:
        return (await stack.client.responses.retrieve(response_id)).status not in ("queued", "in_progress")

    await eventually(over)
    return await stack.client.responses.retrieve(response_id)


async def journal_length(stack: Stack, response_id: str, length: int) -> bool:
    return len(await stack.store.records.load("", response_id.removeprefix("resp_"))) == length


def background_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("background resp_")]


async def followed(stack: Stack, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    """All events of the stream, after the one with this number."""
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = await stack.http.get(f"{RESPONSES}/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")]


async def test_a_response_is_answered_at_once_and_read_at_any_gateway() -> None:
    async with open_pair() as (first, second):
        first.decoder.gate.clear()
        response = await begin(first)
        assert (response.status, response.background, response.output) == ("queued", True, [])
        for each in (first, second):
            assert (await each.client.responses.retrieve(response.id)).status == "in_progress"
        first.decoder.gate.set()
        done = await ended(second, response.id)
        assert (done.status, done.output_text) == ("completed", TEXT)
        assert done == await first.client.responses.retrieve(response.id)
        assert len(first.decoder.requests) == 1
        follow_up = await second.client.responses.create(model=MODEL, input="more", previous_response_id=response.id)
        assert follow_up.status == "completed"


async def test_the_stream_of_a_running_response_is_followed_from_any_event_on() -> None:
    """At both gateways and more than once; a client that leaves disturbs nobody."""
    async with open_pair() as (first, second):
        first.decoder.hold_after = 4
        response = await begin(first)
        await until(lambda: not first.decoder.gate.is_set())
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(followed(each, response.id)) for each in (first, second)]
            leaving = tasks.create_task(followed(first, response.id))
            await asyncio.sleep(0.3)
            leaving.cancel()
            first.decoder.gate.set()
        events = following[0].result()
        assert following[1].result() == events
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]["store"]) == ("response.completed", True)
        assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == TEXT
        for number in range(len(events)):
            assert await followed(second, response.id, number) == events[number + 1 :]
        request_id = response.id.removeprefix("resp_")
        url = f"{RESPONSES}/{response.id}?stream=true&starting_after=0"
        resumed = await second.http.get(url, headers={"last-event-id": f"{request_id}:3"})
        assert re.findall(r"^id: .*:(\d+)$", resumed.text, re.MULTILINE) == [str(n + 1) for n in range(3, len(events))]
        stranger = await second.http.get(url, headers={"last-event-id": f"{'0' * 32}:3"})
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "stream_not_found")
        assert (await first.http.get(f"{RESPONSES}/{response.id}")).json() == events[-1]["response"]
        assert len(first.decoder.requests) == 1


async def test_only_a_response_that_has_ended_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A past bug: a running one was not found, and then stored after all."""
    save, saving = ResponseHistory.save, asyncio.Event()

    async def save_later(*arguments: Any) -> bool:
        await saving.wait()
        return await save(*arguments)

    monkeypatch.setattr(ResponseHistory, "save", save_later)
    async with open_pair() as (first, second):
        first.decoder.gate.clear()
        response = await begin(first)
        for each in (first, second):
            with pytest.raises(openai.ConflictError, match="cancel it first"):
                await each.client.responses.delete(response.id)
        first.decoder.gate.set()
        await ended(second, response.id)
        for each in (first, second):
            with pytest.raises(openai.ConflictError, match="try again"):
                await each.client.responses.delete(response.id)
        saving.set()
        await first.idle()
        await until(lambda: not background_tasks())
        await second.client.responses.delete(response.id)
        for each in (first, second):
            with pytest.raises(openai.NotFoundError):
                await each.client.responses.retrieve(response.id)


async def test_a_stream_begun_with_the_response_is_resumed_by_its_ids() -> None:
    async with open_pair() as (first, second):
        body = {"input": "x", "background": True, "stream": True}
        whole = (await first.http.post(RESPONSES, json=body)).text.split("\n\n")
        last = whole[2].split("\n")[0].removeprefix("id: ")
        rest = await second.http.post(RESPONSES, headers={"last-event-id": last})
        assert rest.text.split("\n\n") == whole[3:]
        assert len(first.decoder.requests) == 1


@pytest.mark.parametrize("deltas", [0, 3])
async def test_a_response_is_cancelled_at_another_gateway(deltas: int) -> None:
    """While it waits for its first token, and later."""
    async with open_pair() as (first, second):
        first.decoder.hold_after = deltas or None
        if not deltas:
            first.decoder.gate.clear()
        response = await begin(first)
        await until(lambda: first.decoder.requests and not first.decoder.gate.is_set())
        await eventually(lambda: journal_length(second, response.id, 3 + deltas))
        assert (await second.client.responses.cancel(response.id)).status == "cancelled"
        done = await ended(second, response.id)
        assert (done.status, done.usage.output_tokens) == ("cancelled", deltas)
        assert TEXT.startswith(done.output_text)
        assert (await first.client.responses.cancel(response.id)).status == "cancelled"
        await first.decoder.cancelled.get()
        await first.idle()


async def test_a_gateway_that_stops_leaves_its_responses_to_others() -> None:
    """At once: it does not wait for them, as it does for other requests."""
    with EmbeddedRedis() as redis:
        async with open_stack(text_script(TEXT), redis_url=redis.url, burst=1) as first:
            async with asyncio.timeout(20.0), another_gateway(first, redis.url, drain_s=60.0) as second:
                first.decoder.hold_after = 3
                response = await begin(second)
                await until(lambda: not first.decoder.gate.is_set())
            first.decoder.gate.set()
            done = await ended(first, response.id)
            assert (done.status, done.output_text) == ("completed", TEXT)


async def test_a_gateway_that_was_silent_loses_its_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one goes on; the first one cancels, and no token is doubled."""
    async with open_pair() as (first, second):
        first.decoder.hold_after = 3
        monkeypatch.setattr(background, "LEASE_S", 0.01)  # less than the time between two renewals
        response = await begin(first)
        await until(lambda: len(first.decoder.requests) > 1 and not first.decoder.gate.is_set())
        monkeypatch.setattr(background, "LEASE_S", 60.0)
        first.decoder.gate.set()
        done = await ended(second, response.id)
        assert (done.status, done.output_text) == ("completed", TEXT)


async def test_a_failed_response_says_so_as_long_as_its_stream_is_kept() -> None:
    def failing(request: GenerationRequest) -> list[int]:
        raise FailsAfter("out of slots", list(counts(request)[:3]))

    async with open_stack(failing, burst=1) as stack:
        response = await begin(stack)
        done = await ended(stack, response.id)
        assert (done.status, done.error.message) == ("failed", "out of slots")
        assert (await followed(stack, response.id))[-1]["type"] == "response.failed"
        await stack.client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await stack.client.responses.delete(response.id)


async def test_what_the_background_takes(tmp_path: Path) -> None:
    names = ("alice", "bob")
    write(tmp_path / "keys.json", KeyFile(keys=tuple(ApiKey(name=name, sha256=digest(name)) for name in names)))
    alice, bob = ({"authorization": f"Bearer {name}"} for name in names)
    body = {"input": "x", "background": True}
    async with open_stack(text_script(TEXT), api_keys=tmp_path / "keys.json") as stack:
        not_kept = await stack.http.post(RESPONSES, json=body | {"store": False}, headers=alice)
        assert (not_kept.status_code, not_kept.json()["error"]["param"]) == (400, "background")
        created = await stack.http.post(RESPONSES, json=body, headers=alice)
        response_id = created.json()["id"]
        for call in (
            stack.http.get(f"{RESPONSES}/{response_id}", headers=bob),
            stack.http.get(f"{RESPONSES}/{response_id}?stream=true", headers=bob),
            stack.http.post(f"{RESPONSES}/{response_id}/cancel", headers=bob),
        ):
            assert (await call).status_code == 404
        wrong = await stack.http.get(f"{RESPONSES}/{response_id}?stream=true&starting_after=x", headers=alice)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
        plain = await stack.http.post(RESPONSES, json={"input": "x", "stream": True}, headers=alice)
        assert plain.status_code == 200
    for limits in (RecordLimits(response_s=0), RecordLimits(resumable_s=0)):
        async with open_stack(text_script(TEXT), records=limits) as stack:
            with pytest.raises(openai.BadRequestError, match="keeps no responses or streams"):
                await begin(stack)
    with EmbeddedRedis() as redis:
        async with open_stack(text_script(TEXT), redis_url=redis.url) as stack:
            redis.kill()
            with pytest.raises(openai.InternalServerError, match="takes Redis"):
                await begin(stack)
