"""API keys: the file, authentication, limits, and what is reported of each key. Over real sockets."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from paceline.api_keys import ApiKey, KeyFile, KeyFileError, digest, new_key, read, write
from paceline.cli.app import main
from paceline.messages import Delta
from paceline.v1 import inference_pb2 as pb
from paceline.v1.common_pb2 import FINISH_REASON_CANCELLED
from paceline_services.gateway.api_errors import OverloadedError, RateLimitError
from paceline_services.gateway.auth import ANONYMOUS, ApiClient
from paceline_services.gateway.generation.bodies import CompletionBody
from paceline_services.gateway.generation.request_builder import build_requests
from tests.helpers.openai_stack import Stack, counts, generated, open_stack, refusal
from tests.helpers.waiting import until

Request = pb.GenerateRequest


def entry(name: str = "alice", key: str = "k", **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=digest(key), **limits)


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
        self._entries[name] = entry(name, self.given[name], **limits)
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
    return await stack.complete("hello", headers, **{"max_tokens": 30, **fields})


async def test_a_known_key_is_accepted_and_nothing_else(stack: Stack, keys: Keys) -> None:
    key = keys.given["alice"]
    for known in (f"Bearer {key}", f"bearer  {keys.given['bob']}"):
        assert (await ask(stack, {"authorization": known})).status_code == 200
    stack.decoder.requests.clear()
    wrong = ["", "Bearer", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}", f"Bearer {digest(key)}"]
    for value in wrong:
        answer = await ask(stack, {"authorization": value})
        assert answer.status_code == 401, value
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert key not in answer.text
    assert (await ask(stack, {"authorization": b"Bearer \xfc"})).status_code == 401  # type: ignore[dict-item]
    assert stack.decoder.requests == []


async def test_all_paths_but_probes_need_a_key(stack: Stack) -> None:
    closed = (
        "/v1/models",
        "/docs",
        "/operator/state",
        "/load",
        "/server_info",
        "/no/such/path",
        "/health/",
        "/pages/",
        "/operator/",
    )
    for path in (*closed, f"http://{stack.addresses.http}//health"):
        assert (await stack.http.get(path)).status_code == 401
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/abort_requests"):
        assert (await stack.http.post(path)).status_code == 401
    assert (await stack.http.options("/v1/completions")).status_code == 401
    probes = ("/health", "/live", "/metrics", "/ready", "/version")
    for path in (*probes, "/", "/operator", "/pages/settings.json"):
        assert (await stack.http.get(path)).status_code == 200


async def test_a_body_without_a_key_is_not_read(stack: Stack) -> None:
    """The response comes before the body."""
    async with stack.connection() as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\n{")
        assert b"401 Unauthorized" in await reader.readline()
        assert await reader.read()


async def test_the_official_client(stack: Stack, keys: Keys) -> None:
    base = f"http://{stack.addresses.http}/v1"
    keys.add("once", requests_per_minute=1)
    async with openai.AsyncOpenAI(base_url=base, api_key=keys.given["once"], max_retries=0) as client:
        await client.completions.create(model="pydoc", prompt="hello")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="pydoc", prompt="hello")
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


def test_limits_over_time() -> None:
    """A minute's worth plus the refill is admitted, however the requests are spread. A refused request costs nothing,
    and a client that used more tokens than it had waits until they have come in again."""
    now = 0.0
    client = ApiClient(entry(requests_per_minute=10, tokens_per_minute=60_000), clock=lambda: now)
    now = 3600.0
    admitted = 0
    for _ in range(3600):
        now += 1.0
        try:
            with client.admit():
                admitted += 1
        except RateLimitError:
            pass
    assert 600 <= admitted <= 610
    now += 60.0
    with client.admit():
        client.count_tokens(90_000, "output")
    with pytest.raises(RateLimitError, match=r"30\.0 s"), client.admit():
        pass
    now += 30.5
    with client.admit():
        pass


async def test_prompts_count_once_and_choices_each(stack: Stack, keys: Keys) -> None:
    await ask(stack, keys["alice"], n=3)
    usage = (await ask(stack, keys["bob"])).json()["usage"]
    counted = await stack.metrics()
    assert f'paceline_key_tokens_total{{key="alice",kind="prompt"}} {float(usage["prompt_tokens"])}' in counted
    assert 'paceline_key_tokens_total{key="alice",kind="output"} 90.0' in counted
    assert 'paceline_key_tokens_total{key="bob",kind="output"} 30.0' in counted


async def test_a_request_refused_as_it_begins_costs_nothing() -> None:
    """There was capacity when the request was read, and there is none when it begins."""
    client = ApiClient(entry(tokens_per_minute=1000), clock=lambda: 0.0)
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


async def test_a_request_that_goes_on_costs_what_is_new() -> None:
    """Its earlier gateway has counted the prompts, also of completions that had no token yet."""
    client = ApiClient(entry(tokens_per_minute=1000), clock=lambda: 0.0)

    async def before(*deltas: tuple[int, Delta]) -> AsyncGenerator[tuple[int, Delta]]:
        for each in deltas:
            yield each

    async with open_stack(counts) as stack:
        body = CompletionBody.model_validate({"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 5})
        requests = await build_requests(body, stack.model, "r", client, {})
        first = counts(requests[1])[:1]
        async for _ in stack.model.generate_all(requests, client, before((1, Delta("r-1", [*first])))):
            pass
        assert client.headers["x-ratelimit-remaining-tokens"] == str(1000 - (4 * 5 - 1))
        async for _ in stack.model.generate_all(requests, client, before()):
            pass  # a response in the background begins so
        assert client.headers["x-ratelimit-remaining-tokens"] == str(1000 - (4 * 5 - 1) - (4 + 4 * 5))


async def test_requests_at_once(stack: Stack, keys: Keys) -> None:
    """While a response streams, another request exceeds the limit; after its client has left, it does not."""
    keys.add("eve", max_concurrent=1)
    stack.decoder.hold_after = 2
    streamed = stack.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}, headers=keys["eve"])
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


async def test_a_client_at_its_limit_ends_reads_and_resumes_what_it_runs(stack: Stack, keys: Keys) -> None:
    """But it begins no further request, and resumes one at a time."""
    keys.add("frank", max_concurrent=1, tokens_per_minute=1)
    stack.decoder.hold_after = 2
    body = {"prompt": "x", "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body, headers=keys["frank"]) as answer:
        lines = answer.aiter_lines()
        event_id = (await anext(lines)).removeprefix("id: ")
        again = {**keys["frank"], "last-event-id": event_id}
        for method, path, status in (
            ("POST", "/v1/completions", 429),
            ("GET", "/v1/responses/resp_x?stream=true", 429),
            ("GET", "/v1/models", 200),
            ("GET", "/v1/responses/resp_x", 404),
            ("POST", "/v1/responses/resp_x/cancel", 404),
        ):
            headers = keys["frank"] | {"last-event-id": ""}  # which resumes nothing
            answered = await stack.http.request(method, path, json={"prompt": "x"}, headers=headers)
            assert answered.status_code == status, path
        async with stack.http.stream("POST", "/v1/completions", headers=again) as resumed:
            assert resumed.status_code == 429  # its tokens are used up
        ids = [event_id.partition(":")[0]]
        aborted = await stack.http.post("/abort_requests", json={"request_ids": ids}, headers=keys["frank"])
        assert aborted.json() == {"aborted": ids}
    stack.decoder.gate.set()


async def test_an_empty_event_id_resumes_nothing(stack: Stack, keys: Keys) -> None:
    keys.add("frank", max_concurrent=1)
    stack.decoder.hold_after = 2
    body = {"prompt": "x", "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body, headers=keys["frank"]) as answer:
        await anext(answer.aiter_lines())
        headers = keys["frank"] | {"last-event-id": ""}
        assert (await stack.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 429
    stack.decoder.gate.set()


def test_a_resumption_may_be_one_more() -> None:
    """The connection that it replaces may still count."""
    client = ApiClient(entry(max_concurrent=1))
    with client.admit(), client.admit(generates=False), client.admit(resumes=True):
        for again in ({}, {"resumes": True}):
            with pytest.raises(RateLimitError), client.admit(**again):
                pass


def test_any_end_of_a_request_frees_its_place() -> None:
    client = ApiClient(entry(max_concurrent=1))
    for error in (ValueError, GeneratorExit):
        with pytest.raises(error), client.admit():
            raise error
    with client.admit(), pytest.raises(RateLimitError), client.admit():
        pass
    with client.admit():
        pass


async def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    stack: Stack, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.add("carol", requests_per_minute=1)
    assert (await ask(stack, keys["carol"])).status_code == 200
    keys.add("new")
    keys.remove("alice")
    known = [(await ask(stack, keys[name])).status_code for name in ("new", "alice", "bob", "carol")]
    assert known == [200, 401, 200, 429], "carol's count outlives the change"
    keys.path.write_text('{"keys": [{"name": "mallory", "sha256": "secret-in-the-wrong-place"}]}')
    assert (await ask(stack, keys["bob"])).status_code == 200
    keys.path.unlink()
    assert (await ask(stack, keys["bob"])).status_code == 200
    assert "the API keys stay as they were" in caplog.text
    assert "secret-in-the-wrong-place" not in caplog.text
    write(keys.path, KeyFile())
    for header in (keys["bob"], {"authorization": "Bearer"}):
        assert (await ask(stack, header)).status_code == 401


async def test_nobody_aborts_another_client_s_request(stack: Stack, keys: Keys) -> None:
    """A client at its limit can abort: that is no request."""
    keys.add("carol", max_concurrent=1)
    stack.decoder.gate.clear()
    async with stack.inference() as stub:

        async def aborted(name: str) -> bool:
            answer = await stub.Abort(pb.AbortRequest(request_id="7"), metadata=tuple(keys[name].items()))
            return bool(answer.aborted)

        call = stub.Generate(Request(text="x", request_id="7"), metadata=tuple(keys["carol"].items()))
        await until(lambda: stack.decoder.requests)
        assert [await aborted(name) for name in ("alice", "bob", "carol", "carol")] == [False, False, True, False]
        assert [each.finish_reason async for each in call] == [FINISH_REASON_CANCELLED]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(pb.AbortRequest(request_id="7"))
        assert refused.value.code() is StatusCode.UNAUTHENTICATED


async def test_grpc(stack: Stack, keys: Keys) -> None:
    keys.add("carol", requests_per_minute=1)
    request = Request(text="hello")
    async with stack.inference() as stub:
        for headers in ({}, {"authorization": "Bearer pl-wrong"}, {"api-key": keys.given["alice"]}):
            assert (await refusal(stub, request, headers)).code() is StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=tuple(headers.items()))
            assert refused.value.code() is StatusCode.UNAUTHENTICATED
        assert await generated(stub, request, keys["carol"])
        second = await refusal(stub, request, keys["carol"])
        assert second.code() is StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = dict(second.trailing_metadata() or ())
        assert 0 < int(trailing["retry-after"]) <= 60
        assert int(trailing["grpc-retry-pushback-ms"]) == 1000 * int(trailing["retry-after"])
        assert trailing["x-ratelimit-limit-requests"] == "1"
    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert 'endpoint="Generate",status="UNAUTHENTICATED"' in await stack.metrics()


@pytest.mark.parametrize("method", ["Generate", "ListModels", "Tokenize", "Detokenize", "Abort"])
async def test_a_message_without_a_key_is_not_read(stack: Stack, method: str) -> None:
    """The response comes before the message."""
    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        call = channel.stream_stream(f"/paceline.v1.InferenceService/{method}")(timeout=10.0)
        assert await call.code() is StatusCode.UNAUTHENTICATED


async def test_large_messages_without_a_key_are_refused_and_counted_once(stack: Stack) -> None:
    async with stack.inference() as stub:
        for _ in range(3):
            refused = await refusal(stub, Request(text="x" * 7_000_000))
            assert refused.code() is StatusCode.UNAUTHENTICATED
            assert refused.details() == "no API key: send it as `Authorization: Bearer KEY`"
    metrics = await stack.metrics()
    assert 'paceline_requests_total{endpoint="Generate",status="UNAUTHENTICATED"} 3.0' in metrics
    assert "paceline_unknown_keys_total 3.0" in metrics


async def test_tenants_share_no_prefix(stack: Stack, keys: Keys) -> None:
    """Salts at the target are equal if and only if key and salt are."""
    asked = [("alice", None), ("bob", None), ("alice", "s"), ("bob", "s"), ("alice", ":")] * 2
    for name, salt in asked:
        await ask(stack, keys[name], cache_salt=salt)
    salts = [request.cache_salt for request in stack.decoder.requests]
    assert len(set(salts)) == 5
    assert salts[:5] == salts[5:]
    assert all(len(salt) == 32 for salt in salts), "digests, not the client's text"


async def test_without_keys_salts_alone_keep_apart() -> None:
    async with open_stack(counts) as stack:
        for salt in (None, "a", "b", "a"):
            await ask(stack, {}, cache_salt=salt)
        salts = [request.cache_salt for request in stack.decoder.requests]
        assert (salts[0], len(set(salts)), salts[1]) == ("", 3, salts[3])


def test_no_pair_of_name_and_salt_has_the_digest_of_another() -> None:
    clients = [ANONYMOUS, *(ApiClient(entry(name)) for name in ("a", "ab", "1", "a.1"))]
    salts = [None, "a", "b", ":", "1:a", "2:ab", ":1:a"]
    digests = [client.cache_salt_for(salt) for client in clients for salt in salts]
    assert len(set(digests)) == len(digests)


async def test_requests_carry_client_and_group_to_the_target(stack: Stack, keys: Keys) -> None:
    """The target's scheduler alternates by them."""
    for name in ("alice", "alice", "bob"):
        await ask(stack, keys[name], n=2)
    owners = [(request.client, request.group) for request in stack.decoder.requests]
    assert [client for client, _ in owners] == ["alice"] * 4 + ["bob"] * 2
    assert owners[::2] == owners[1::2], "the choices of a request"
    assert len({group for _, group in owners}) == 3


async def test_metrics_show_names_and_no_secrets(stack: Stack, keys: Keys) -> None:
    keys.add("carol", requests_per_minute=1)
    for headers in (keys["alice"], keys["carol"], keys["carol"], {"authorization": "Bearer pl-wrong"}):
        await ask(stack, headers)
    metrics = await stack.metrics()
    assert 'paceline_key_requests_total{key="alice"} 1.0' in metrics
    assert 'paceline_key_refused_total{key="carol",limit="requests"} 1.0' in metrics
    assert "paceline_unknown_keys_total 1.0" in metrics
    for secret in ("pl-wrong", *keys.given.values(), *map(digest, keys.given.values())):
        assert secret not in metrics


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not valid JSON"),
        ('{"keys": [{"name": "a", "key": "pl-plain"}]}', "sha256"),
        ('{"keys": [{"name": "a", "sha256": "pl-plain"}]}', "sha256"),
        ('{"keys": [{"name": "a b", "sha256": "pl-plain"}]}', "name"),
        (f'{{"keys": [{{"name": "a", "sha256": "{"0" * 64}", "rpm": 5}}]}}', "rpm"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_without_quoting_it(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=complaint) as refused:
        read(path)
    assert "pl-plain" not in str(refused.value)


@pytest.mark.parametrize("twice", [[entry("a", "1"), entry("a", "2")], [entry("a", "1"), entry("b", "1")]])
def test_two_of_a_kind_are_refused(twice: list[ApiKey]) -> None:
    with pytest.raises(ValueError, match="two keys have the same"):
        KeyFile(keys=tuple(twice))


def test_the_command_line_makes_and_withdraws_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    run = CliRunner().invoke
    file = ("--file", str(path))
    made = run(main, ["keys", "add", "alice", *file, "--tokens-per-minute", "5000"])
    key = made.stdout.strip()
    assert made.exit_code == 0
    assert len(key) == len("pl-") + 43, "256 bits in base64"
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path).keys == (entry("alice", key, tokens_per_minute=5000),)
    again = run(main, ["keys", "add", "alice", *file])
    assert again.exit_code == 2
    assert "taken" in again.stderr
    assert run(main, ["keys", "remove", "bob", *file]).exit_code == 2
    assert run(main, ["keys", "remove", "alice", *file]).exit_code == 0
    assert read(path) == KeyFile()
