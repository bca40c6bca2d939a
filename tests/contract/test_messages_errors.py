"""Errors below `/v1/messages` have Anthropic's shape, and its client raises the exceptions that fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline_services.gateway.generation.admission import AdmissionLimits
from tests.contract.anthropic_stack import (
    BODY_LIMIT,
    CONTEXT,
    COUNT_TOKENS,
    MESSAGES,
    MessagesStack,
    complete,
    error_of,
    open_messages_stack,
    says,
)
from tests.helpers.openai_stack import MODEL, counts, open_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[MessagesStack]:
    async with open_messages_stack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "type_"),
    [
        ("POST", MESSAGES, complete(model="claude"), 404, "not_found_error"),
        ("POST", COUNT_TOKENS, complete(model="claude", max_tokens=None), 404, "not_found_error"),
        ("POST", MESSAGES, complete(system="x" * BODY_LIMIT), 413, "request_too_large"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", {}, 404, "not_found_error"),
        ("POST", MESSAGES, {"model": MODEL}, 400, "invalid_request_error"),
        ("POST", MESSAGES, complete(stream=True, temperature=-1), 400, "invalid_request_error"),
    ],
)
async def test_errors_have_types_by_status(
    served: MessagesStack, method: str, path: str, content: Any, status: int, type_: str
) -> None:
    """An error comes before the headers of a stream, too."""
    response = await served.stack.http.request(method, path, json=content, headers={"x-request-id": "mine"})
    assert response.status_code == status
    assert error_of(response)["type"] == type_
    assert response.headers["request-id"] == "mine"


async def test_other_paths_keep_openai_s_shape(served: MessagesStack) -> None:
    response = await served.stack.http.post("/v1/messagesx", json={})
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "request-id" not in response.headers


@pytest.mark.parametrize(
    ("fields", "exception"),
    [({"temperature": -1}, anthropic.BadRequestError), ({"model": "claude"}, anthropic.NotFoundError)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_raises_its_own_exceptions(
    served: MessagesStack, fields: Any, exception: type[anthropic.APIStatusError], stream: bool
) -> None:
    with pytest.raises(exception) as error:
        await (served.stream if stream else served.create)(**fields)
    assert error.value.request_id == error.value.response.json()["request_id"]


async def test_a_prompt_that_is_too_long_is_named_as_agents_expect_it(served: MessagesStack) -> None:
    response = await served.post(messages=[says("user", "x " * CONTEXT)])
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("prompt is too long: ")


async def test_an_error_in_a_stream_is_its_last_event(served: MessagesStack) -> None:
    served.speak("one two three four five six seven", error="out of slots")
    with pytest.raises(anthropic.APIStatusError, match="out of slots"):
        await served.stream()
    start, *_, error = await served.events()
    assert start["type"] == "message_start"
    assert error["error"] == {"type": "api_error", "message": "out of slots"}
    assert error["request_id"]


async def test_without_a_target_clients_try_again_later() -> None:
    async with open_stack() as empty:
        response = await empty.http.post(MESSAGES, json=complete())
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert error_of(response)["type"] == "overloaded_error"


async def test_too_many_requests_are_refused_at_once() -> None:
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=1)) as busy:
        busy.decoder.gate.clear()
        waiting = await busy.begin()
        response = await busy.http.post(MESSAGES, json=complete())
        assert response.status_code == 429
        assert error_of(response)["type"] == "rate_limit_error"
        busy.decoder.gate.set()
        assert (await waiting).status_code == 200


async def test_keys_come_in_either_header(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, KeyFile(keys=(ApiKey(name="alice", sha256=digest("secret")),)))
    async with open_stack(counts, api_keys=path) as stack:
        url = f"http://{stack.addresses.http}"
        for credentials in ({"api_key": "secret"}, {"auth_token": "secret"}):
            async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **credentials) as client:
                message = await client.messages.create(**complete(max_tokens=5))
                assert message.usage.output_tokens == 5
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**complete())
        assert error_of(refused.value.response)["type"] == "authentication_error"
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
            ({}, 401),
        ):
            answer = await stack.http.post(MESSAGES, json=complete(max_tokens=5), headers=headers)
            assert answer.status_code == status, headers
