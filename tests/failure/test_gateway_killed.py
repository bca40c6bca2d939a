"""A gateway is killed: its clients go on at another one, and so do the responses that no client waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from loadtests.received_stream import ReceivedStream
from paceline.messages import GenerationRequest
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.openai_stack import MODEL, Stack, counts, open_stack
from tests.helpers.service_processes import ServiceProcess, service_process
from tests.helpers.waiting import eventually, until

pytestmark = pytest.mark.alone

TOKENS = 60
BODY = {"prompt": "x", "max_tokens": TOKENS, "return_token_ids": True, "stream": True}


@dataclass
class Scene:
    stack: Stack
    """The gateway that lives, and the target of both."""
    gateway: ServiceProcess
    http: httpx.AsyncClient
    """For the gateway that is killed."""


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    with EmbeddedRedis() as redis:
        async with open_stack(counts, redis_url=redis.url, burst=1) as stack:
            arguments = ("--model", MODEL, "--port", "0", "--redis-url", redis.url)
            with service_process("gateway", *arguments) as gateway:
                async with httpx.AsyncClient(base_url=gateway.address, timeout=20.0, trust_env=False) as http:

                    async def ready() -> bool:
                        return (await http.get("/health")).status_code == 200

                    await eventually(ready)
                    yield Scene(stack, gateway, http)


def expected(request: GenerationRequest) -> list[int]:
    return list(counts(request))[:TOKENS]


async def test_streams_go_on_after_the_last_event_that_each_client_saw() -> None:
    """Their seeds were drawn by the gateway that is dead."""
    async with scene() as here:
        streams = [ReceivedStream() for _ in range(6)]

        async def read(stream: ReceivedStream) -> None:
            async with here.http.stream("POST", "/v1/completions", json=BODY) as response:
                async for line in response.aiter_lines():
                    stream.feed(line)

        here.stack.decoder.gate.clear()
        readers = [asyncio.create_task(read(each)) for each in streams]
        await until(lambda: len(here.stack.decoder.requests) == len(streams))
        here.stack.decoder.hold_after = len(streams) * 20  # in turns, so some 20 tokens of each
        here.stack.decoder.gate.set()
        await until(lambda: all(each.tokens for each in streams) and not here.stack.decoder.gate.is_set())
        here.gateway.process.kill()
        broken = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(each, httpx.TransportError) for each in broken)
        here.stack.decoder.gate.set()
        begun = {request.group: request for request in here.stack.decoder.requests}
        for stream in streams:
            assert 0 < len(stream.tokens) < TOKENS
            headers = {"last-event-id": stream.last_id}
            async with here.stack.http.stream("POST", "/v1/completions", headers=headers) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    stream.feed(line)
            assert stream.complete
            assert stream.tokens == expected(begun[stream.last_id.partition(":")[0]])
        assert len({tuple(each.tokens) for each in streams}) > 1, "seeds differ, though two outputs may be the same"


async def test_a_response_in_the_background_is_finished_by_another_gateway() -> None:
    async with scene() as here:
        here.stack.decoder.hold_after = 20
        body = {"input": "x", "background": True, "max_output_tokens": TOKENS}
        created: dict[str, Any] = (await here.http.post("/v1/responses", json=body)).json()
        assert created["status"] == "queued"
        await until(lambda: not here.stack.decoder.gate.is_set())
        url = f"/v1/responses/{created['id']}"

        async def begun() -> bool:
            response = (await here.stack.http.get(url)).json()
            assert response["status"] == "in_progress"
            return bool(response["output"])  # so there are tokens in its journal

        await eventually(begun)
        here.gateway.process.kill()
        following = asyncio.create_task(here.stack.http.get(f"{url}?stream=true&starting_after=3"))
        here.stack.decoder.gate.set()

        async def ended() -> bool:
            return (await here.stack.http.get(url)).json()["status"] == "incomplete"

        await eventually(ended)
        [first, resumed] = here.stack.decoder.requests
        response = (await here.stack.http.get(url)).json()
        [item] = response["output"]
        text = here.stack.model.tokenizer.decode(expected(first))
        assert item["content"][0]["text"] == text
        assert list(resumed.committed) == expected(first)[: len(resumed.committed)] != []
        lines = (await following).text.split("\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert [each["sequence_number"] for each in events] == list(range(4, 4 + len(events)))
        assert events[-1]["response"] == response
