"""Streams that say that they live while there is nothing to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from paceline_services.gateway.api_errors import ApiError, OverloadedError
from paceline_services.gateway.http.event_stream import COMMENT, EventStream, ServerSentEvent
from tests.contract.test_resuming import comparable, events_in, stream
from tests.helpers.openai_stack import EOS, open_stack

SOON_S = 0.03
OUTPUT = [*range(300, 308), EOS]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "seed": 1}
EVENT = 'event: ping\ndata: {"type":"ping"}\n\n'
APIS = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 9, "seed": 1}, COMMENT.decode()),
    ("/v1/chat/completions", CHAT, COMMENT.decode()),
    ("/v1/responses", {"input": "x", "max_output_tokens": 9, "store": False}, COMMENT.decode()),
    ("/v1/messages", {"model": "pydoc", **CHAT}, EVENT),
]


@pytest.mark.parametrize("held_after", [0, 1], ids=["before the first token", "between tokens"])
@pytest.mark.parametrize(("path", "body", "ping"), APIS, ids=[path for path, *_ in APIS])
async def test_a_silent_stream_sends_pings(path: str, body: dict[str, Any], ping: str, held_after: int) -> None:
    """The events are those of a stream that is not silent."""
    async with open_stack(lambda _: OUTPUT, ping_s=SOON_S) as stack:
        stack.decoder.hold_after = held_after
        if not held_after:
            stack.decoder.gate.clear()
        text = ""
        async with stack.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                text += part
                if events_in(text).count(ping) >= 2:  # those of the API itself have ids
                    stack.decoder.gate.set()
        events = events_in(text)
        assert events.count(ping) >= 2
        assert comparable([each for each in events if each != ping]) == comparable(await stream(stack, path, body))


async def sent(
    events: AsyncGenerator[ServerSentEvent], ping_s: float, messages: list[Message], **options: Any
) -> list[Message]:
    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "path": "/", "app": SimpleNamespace(state=SimpleNamespace(ping_s=ping_s))}
    await EventStream(events, **options)(scope, receive, send)
    return messages


async def late(error: Exception | None = None) -> AsyncGenerator[ServerSentEvent]:
    await asyncio.sleep(3.5 * SOON_S)
    if error is not None:
        raise error
    yield ServerSentEvent("x")


async def test_an_error_after_a_ping_is_an_event() -> None:
    start, *parts = await sent(late(OverloadedError("too many")), SOON_S, [])
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    *pings, error, closing = [each["body"] for each in parts]
    assert set(pings) == {COMMENT}
    assert b"too many" in error
    assert closing == b"data: [DONE]\n\n"


async def test_an_error_before_a_ping_is_an_ordinary_response() -> None:
    messages: list[Message] = []
    with pytest.raises(ApiError, match="too many"):
        await sent(late(OverloadedError("too many")), 60.0, messages)
    assert messages == []


async def test_a_stream_may_be_silent() -> None:
    assert next(each["body"] for each in await sent(late(), 0.0, []) if "body" in each) == b"data: x\n\n"
