"""Errors have OpenAI's shape, name the field, and disturb no other request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from paceline_services.gateway.admission import AdmissionLimits
from tests.helpers.openai_stack import MODEL, Stack, counts, open_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Any = [{"role": "user", "content": "hi"}]
BODY_LIMIT = 20_000


def schema_of(schema: dict[str, Any] | str) -> dict[str, Any]:
    """A body that wants this JSON."""
    named = {"name": "answer", "schema": schema}
    return {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": named}}


def nested(depth: int) -> str:
    """A schema as a string: JSON's own limits do not apply inside it."""
    return '{"enum": ' + "[" * depth + "]" * depth + "}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(counts, limits=AdmissionLimits(max_body_bytes=BODY_LIMIT)) as stack:
        yield stack


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [5] * 128}, "prompt"),
        ({"prompt": "x", "max_tokens": 128}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": "x", "min_tokens": -1}, "min_tokens"),
        ({"prompt": "x", "temperature": -0.1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_p": 1.1}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "min_p": 2}, "min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 129}, "n"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "stop": ""}, "stop[0]"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"prompt": "x", "logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"prompt": "x", "speculative": {"k": 3}}, "speculative.k"),
        ({"prompt": "x", "speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
        ({"prompt": "x", "speculative": "no"}, "speculative"),
    ],
)
async def test_completions_name_the_wrong_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    stack.decoder.requests.clear()
    error = error_of(await stack.http.post("/v1/completions", json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert stack.decoder.requests == [], "nothing reaches a target"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": CHAT, "max_completion_tokens": 128}, "max_completion_tokens"),
        ({"messages": CHAT, "response_format": {"type": "json"}}, "response_format.type"),
        ({"messages": CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema_of({"type": "strin"}), "response_format.json_schema.schema"),
        (schema_of({"type": "string", "pattern": "a(?=b)"}), "response_format.json_schema.schema"),
        (schema_of({"type": "object", "dependentSchemas": {}}), "response_format.json_schema.schema"),
        (schema_of(nested(300)), "response_format.json_schema.schema"),
        ({"messages": CHAT, "structured_outputs": {"json": nested(300)}}, "structured_outputs.json"),
        ({"messages": CHAT, "structured_outputs": {"json": nested(3000)}}, "structured_outputs.json"),
        ({"messages": CHAT, "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"messages": CHAT, "structured_outputs": {}}, "structured_outputs"),
        ({"messages": CHAT, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"messages": CHAT, "structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"messages": CHAT, "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"messages": CHAT, "structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
        ({"messages": CHAT, "structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        (
            {"messages": CHAT, "structured_outputs": {"grammar": '%llguidance {}\nstart: "a"'}},
            "structured_outputs.grammar",
        ),
        ({"messages": CHAT, "structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {**schema_of({"type": "integer"}), "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"messages": CHAT, "guided_json": {"type": "integer"}}, "guided_json"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": 3, "tools": 4}, "temperature": -1}, "temperature"),
    ],
)
async def test_chat_names_the_wrong_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    assert error_of(await stack.http.post("/v1/chat/completions", json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[1]", b'"text"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']
)
async def test_broken_json_is_refused(stack: Stack, content: bytes) -> None:
    error_of(await stack.http.post("/v1/completions", content=content), 400)


async def test_bodies_over_the_limit_are_refused(stack: Stack) -> None:
    body = {"prompt": "x" * BODY_LIMIT}
    assert error_of(await stack.http.post("/v1/completions", json=body), 413)["code"] == "body_too_large"


async def test_errors_of_unknown_paths_and_methods_have_the_same_shape(stack: Stack) -> None:
    error_of(await stack.http.get("/v1/nothing"), 404)
    error_of(await stack.http.get("/v1/completions"), 405)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model_is_not_found(stack: Stack, path: str) -> None:
    body = {"model": "gpt-4"} | ({"messages": CHAT} if "chat" in path else {"prompt": "x"})
    error = error_of(await stack.http.post(path, json=body), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_an_error_comes_before_the_headers_of_a_stream(stack: Stack) -> None:
    body = {"prompt": "x", "temperature": -1, "stream": True}
    assert error_of(await stack.http.post("/v1/completions", json=body), 400)["param"] == "temperature"


async def test_the_official_client_raises_its_own_exceptions(stack: Stack) -> None:
    create = stack.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=CHAT, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=CHAT)
    assert missing.value.code == "model_not_found"


async def test_a_failure_of_the_gateway_is_an_error_and_counted(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise KeyError("secret")

    monkeypatch.setattr(stack.models, "check_available", fails)
    answer = await stack.http.get("/health")
    assert "secret" not in error_of(answer, 500)["message"]
    assert 'endpoint="/health",status="500"} 1.0' in (await stack.http.get("/metrics")).text


async def test_an_upload_cut_short_is_no_failure(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    host, port = stack.addresses.http.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n{")
    await writer.drain()
    writer.close()
    while 'endpoint="/tokenize",status="499"' not in (await stack.http.get("/metrics")).text:
        await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_without_a_target_responses_have_retry_after() -> None:
    async with open_stack() as empty:
        for response in (
            await empty.http.get("/health"),
            await empty.http.post("/v1/completions", json={"prompt": "x"}),
            await empty.http.post("/v1/completions", json={"prompt": "x", "stream": True}),
        ):
            assert error_of(response, 503)["code"] == "no_target"
            assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            await empty.client.completions.create(model=MODEL, prompt="x")


async def test_too_many_requests_are_refused_at_once() -> None:
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=2)) as busy:
        busy.decoder.gate.clear()
        stream = busy.http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 2, "stream": True})
        waiting = asyncio.create_task(stream.__aenter__())
        while len(busy.decoder.requests) < 2:
            await asyncio.sleep(0.01)
        response = await busy.http.post("/v1/completions", json={"prompt": "x"})
        assert error_of(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            await busy.client.completions.create(model=MODEL, prompt="x")
        busy.decoder.gate.set()
        await (await waiting).aread()
        await stream.__aexit__(None, None, None)
        assert (await busy.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "n": 5}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 2}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 5}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT, "n": 5}, "n"),
    ],
)
async def test_more_choices_than_are_ever_generated_at_once_are_refused_for_good(
    path: str, body: dict[str, Any], param: str
) -> None:
    """A past bug: they got 429 with Retry-After, for ever."""
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=4)) as stack:
        assert error_of(await stack.http.post(path, json=body), 400)["param"] == param
        assert (await stack.http.post("/v1/completions", json={"prompt": "x", "n": 4})).status_code == 200


async def test_a_request_that_a_target_cannot_serve_fails_alone() -> None:
    def script(request: Any) -> list[int]:
        if request.sampling.seed == 13:
            raise RuntimeError("out of slots")
        return list(counts(request))

    async with open_stack(script) as stack:
        error = error_of(await stack.http.post("/v1/completions", json={"prompt": "x", "seed": 13}), 500)
        assert error["message"] == "out of slots"
        assert (await stack.http.post("/v1/completions", json={"prompt": "x", "seed": 14})).status_code == 200
