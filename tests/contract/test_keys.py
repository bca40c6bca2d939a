"""API keys at the gateway: authentication, limits, and what is reported of each key. Over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.api_keys import ApiKey, KeyFile, digest, new_key, write
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_services.gateway.api_errors import OverloadedError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.openai.bodies import CompletionBody
from paceline_services.gateway.openai.request_builder import build_requests
from tests.helpers.openai_stack import Stack, counts, open_stack

HELLO = {"prompt": "hello", "max_tokens": 30}


class Keys:
    """A key file, and the keys that it knows by hash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given: dict[str, str] = {}
        self._entries: dict[str, ApiKey] = {}
        self.add("alice")
        self.add("bob")

    def add(self, name: str, **limits: int) -> None:
        self.given[name] = new_key()
        self._entries[name] = ApiKey(name=name, sha256=digest(self.given[name]), **limits)
        self._write()

    def remove(self, name: str) -> None:
        del self._entries[name]
        self._write()

    def __getitem__(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.given[name]}"}

    def _write(self) -> None:
        write(self.path, KeyFile(keys=tuple(self._entries.values())))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@pytest_asyncio.fixture
async def stack(keys: Keys) -> AsyncIterator[Stack]:
    async with open_stack(counts, burst=1, api_keys=keys.path) as stack:
        yield stack


async def ask(stack: Stack, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await stack.http.post("/v1/completions", json=HELLO | fields, headers=headers)


async def test_a_known_key_is_accepted(stack: Stack, keys: Keys) -> None:
    assert (await ask(stack, keys["alice"])).status_code == 200
    assert (await ask(stack, {"authorization": f"bearer  {keys.given['bob']}"})).status_code == 200


async def test_other_credentials_are_refused(stack: Stack, keys: Keys) -> None:
    key = keys.given["alice"]
    wrong = [
        "",
        "Bearer",
        f"Basic {key}",
        key,
        f"Bearer {key}x",
        f"Bearer {key[:-1]}",
        f"Bearer {digest(key)}",
    ]
    for value in wrong:
        answer = await ask(stack, {"authorization": value})
        assert answer.status_code == 401, value
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert key not in answer.text
    assert stack.decoder.requests == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/docs"),
        ("GET", "/no/such/path"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("OPTIONS", "/v1/completions"),
    ],
)
async def test_all_other_paths_need_a_key(stack: Stack, method: str, path: str) -> None:
    assert (await stack.http.request(method, path)).status_code == 401


async def test_probes_need_no_key(stack: Stack) -> None:
    for path in ("/health", "/metrics", "/version"):
        assert (await stack.http.get(path)).status_code == 200


async def test_a_body_without_a_key_is_not_read(stack: Stack) -> None:
    """The response comes before the body."""
    reader, writer = await connected(stack)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\n{")
    assert b"401 Unauthorized" in await reader.readline()
    assert await reader.read()
    writer.close()


async def connected(stack: Stack) -> Any:
    host, port = stack.addresses.http.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def test_the_official_client(stack: Stack, keys: Keys) -> None:
    base = f"http://{stack.addresses.http}/v1"
    keys.add("once", requests_per_minute=1)
    async with openai.AsyncOpenAI(base_url=base, api_key=keys.given["once"], max_retries=0) as client:
        assert (await client.completions.create(model="pydoc", **HELLO)).usage is not None  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="pydoc", **HELLO)  # type: ignore[call-overload]
    assert refused.value.code == "rate_limit_exceeded"
    assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
    async with openai.AsyncOpenAI(base_url=base, api_key="pl-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_requests_per_minute(stack: Stack, keys: Keys) -> None:
    keys.add("carol", requests_per_minute=2)
    responses = [await ask(stack, keys["carol"]) for _ in range(3)]
    assert [answer.status_code for answer in responses] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in responses] == ["2"] * 3
    assert responses[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert responses[2].json()["error"]["type"] == "requests"
    assert (await ask(stack, keys["alice"])).status_code == 200
    assert len(stack.decoder.requests) == 3


async def test_tokens_per_minute(stack: Stack, keys: Keys) -> None:
    """The request that uses up the limit is served; the next one waits until the bucket has filled up again."""
    keys.add("dave", tokens_per_minute=20)
    first = await ask(stack, keys["dave"])
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    second = await ask(stack, keys["dave"])
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "tokens"
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    assert abs(int(second.headers["retry-after"]) - 3 * (used - 20 + 1)) <= 3, "three seconds a token"


async def test_prompts_count_once_and_choices_each(stack: Stack, keys: Keys) -> None:
    await ask(stack, keys["alice"], n=3)
    usage = (await ask(stack, keys["bob"])).json()["usage"]
    counted = (await stack.http.get("/metrics")).text
    assert f'paceline_key_tokens_total{{key="alice",kind="prompt"}} {float(usage["prompt_tokens"])}' in counted
    assert 'paceline_key_tokens_total{key="alice",kind="output"} 90.0' in counted
    assert 'paceline_key_tokens_total{key="bob",kind="output"} 30.0' in counted


async def test_a_request_refused_as_it_begins_costs_nothing() -> None:
    """There was capacity when the request was read, and there is none when it begins."""
    client = ApiClient(ApiKey(name="alice", sha256=digest("x"), tokens_per_minute=1000), clock=lambda: 0.0)
    async with open_stack(counts) as stack:
        model, capacity = stack.model, stack.model.capacity
        body = CompletionBody.model_validate({"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 5})
        requests = await build_requests(body, model, "r", client, {})
        capacity.in_flight += capacity.limits.max_in_flight
        with pytest.raises(OverloadedError):
            await anext(model.generate_all(requests, client))
        assert client.headers["x-ratelimit-remaining-tokens"] == "1000"
        capacity.in_flight -= capacity.limits.max_in_flight
        assert len([each async for each in model.generate_all(requests, client)]) > 0
        assert client.headers["x-ratelimit-remaining-tokens"] == str(1000 - 4 - 4 * 5)


async def test_requests_at_once(stack: Stack, keys: Keys) -> None:
    """While a response streams, another request exceeds the limit; after its client has left, it does not."""
    keys.add("eve", max_concurrent=1)
    stack.decoder.hold_after = 2
    streamed = stack.http.stream("POST", "/v1/completions", json=HELLO | {"stream": True}, headers=keys["eve"])
    async with streamed as answer:
        await anext(answer.aiter_lines())
        refused = await ask(stack, keys["eve"])
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "concurrent"
        assert refused.headers["retry-after"] == "1"
    await stack.decoder.cancelled.get()
    stack.decoder.gate.set()
    async with asyncio.timeout(20.0):
        while (await ask(stack, keys["eve"])).status_code == 429:
            await asyncio.sleep(0.01)


async def test_keys_come_and_go_without_a_restart(stack: Stack, keys: Keys) -> None:
    keys.add("new")
    assert (await ask(stack, keys["new"])).status_code == 200
    keys.remove("alice")
    assert (await ask(stack, keys["alice"])).status_code == 401
    assert (await ask(stack, keys["bob"])).status_code == 200


async def test_an_unreadable_file_changes_nothing(stack: Stack, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    keys.path.write_text('{"keys": [{"name": "mallory", "sha256": "secret-in-the-wrong-place"}]}')
    assert (await ask(stack, keys["alice"])).status_code == 200
    keys.path.unlink()
    assert (await ask(stack, keys["alice"])).status_code == 200
    assert "the API keys stay as they were" in caplog.text
    assert "secret-in-the-wrong-place" not in caplog.text


async def test_counts_outlive_a_reload(stack: Stack, keys: Keys) -> None:
    """A new key in the file does not reset the counts of others."""
    keys.add("carol", requests_per_minute=1)
    assert (await ask(stack, keys["carol"])).status_code == 200
    keys.add("new")
    assert (await ask(stack, keys["carol"])).status_code == 429


async def test_grpc(stack: Stack, keys: Keys) -> None:
    keys.add("carol", requests_per_minute=1)
    request = pb.GenerateRequest(text="hello")

    async def generated(stub: Any, metadata: dict[str, str]) -> int:
        return len([each async for each in stub.Generate(request, metadata=tuple(metadata.items()))])

    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        stub = InferenceServiceStub(channel)
        for metadata in ({}, {"authorization": "Bearer pl-wrong"}, {"api-key": keys.given["alice"]}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generated(stub, metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=tuple(metadata.items()))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await generated(stub, keys["carol"]) > 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generated(stub, keys["carol"])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = dict(refused.value.trailing_metadata())  # type: ignore[arg-type]
        assert 0 < int(trailing["retry-after"]) <= 60
        assert int(trailing["grpc-retry-pushback-ms"]) == 1000 * int(trailing["retry-after"])
        assert trailing["x-ratelimit-limit-requests"] == "1"
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert 'endpoint="Generate",status="UNAUTHENTICATED"' in (await stack.http.get("/metrics")).text


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_a_message_without_a_key_is_not_read(stack: Stack, method: str) -> None:
    """The response comes before the message."""
    path = f"/paceline.v1.InferenceService/{method}"
    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        call = channel.stream_stream(path)(timeout=10.0)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_large_messages_without_a_key_are_refused_and_counted_once(stack: Stack) -> None:
    request = pb.GenerateRequest(text="x" * 7_000_000)
    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        stub: Any = InferenceServiceStub(channel)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.Generate(request)))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert refused.value.details() == "no API key: send it as `Authorization: Bearer KEY`"
    metrics = (await stack.http.get("/metrics")).text
    assert 'paceline_requests_total{endpoint="Generate",status="UNAUTHENTICATED"} 3.0' in metrics
    assert "paceline_unknown_keys_total 3.0" in metrics


async def test_tenants_share_no_prefix(stack: Stack, keys: Keys) -> None:
    """Salts at the target are equal if and only if key and salt are."""
    asked = [
        ("alice", None),
        ("bob", None),
        ("alice", "s"),
        ("bob", "s"),
        ("alice", ":"),
        ("alice", None),
        ("alice", "s"),
    ]
    for name, salt in asked:
        await ask(stack, keys[name], cache_salt=salt)
    salts = [request.cache_salt for request in stack.decoder.requests]
    assert len(set(salts)) == 5
    assert salts[0] == salts[5]
    assert salts[2] == salts[6]
    assert all(len(salt) == 32 for salt in salts), "digests, not the client's text"


async def test_requests_carry_client_and_group_to_the_target(stack: Stack, keys: Keys) -> None:
    """The target's scheduler alternates by them."""
    for name in ("alice", "alice", "bob"):
        await ask(stack, keys[name], n=2)
    owners = [(request.client, request.group) for request in stack.decoder.requests]
    assert [client for client, _ in owners] == ["alice"] * 4 + ["bob"] * 2
    assert owners[::2] == owners[1::2], "the choices of a request"
    assert len({group for _, group in owners}) == 3


async def test_without_keys_salts_alone_keep_apart() -> None:
    async with open_stack(counts) as stack:
        for salt in (None, "a", "b", "a"):
            assert (await ask(stack, {}, cache_salt=salt)).status_code == 200
        salts = [request.cache_salt for request in stack.decoder.requests]
        assert salts[0] == ""
        assert len(set(salts)) == 3
        assert salts[1] == salts[3]
        assert (await ask(stack, {}, cache_salt="")).status_code == 400


async def test_metrics_show_names_and_no_secrets(stack: Stack, keys: Keys) -> None:
    keys.add("carol", requests_per_minute=1)
    for headers in (keys["alice"], keys["carol"], keys["carol"], {"authorization": "Bearer pl-wrong"}):
        await ask(stack, headers)
    metrics = (await stack.http.get("/metrics")).text
    assert 'paceline_key_requests_total{key="alice"} 1.0' in metrics
    assert 'paceline_key_refused_total{key="carol",limit="requests"} 1.0' in metrics
    assert "paceline_unknown_keys_total 1.0" in metrics
    for key in keys.given.values():
        assert key not in metrics
        assert digest(key) not in metrics
    assert "pl-wrong" not in metrics
