"""Limits on what HTTP clients send, and how slowly, and their values in the manual. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_services.gateway import admission, server
from paceline_services.gateway.admission import AdmissionLimits
from paceline_services.gateway.api_errors import OverloadedError
from paceline_services.gateway.openai import connection_limits, event_stream
from paceline_services.gateway.openai.prompt_encoding import HUGE_TEXT, MAX_WAITING_HUGE, EncodingThreads
from tests.helpers.openai_stack import CONTEXT, TOKENIZER, Stack, counts, open_stack

MANUAL = Path(__file__).parents[2] / "docs" / "security.md"
SOON_S = 0.05
HEAD = b"GET /version HTTP/1.1\r\nhost: here\r\n"


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = stack.addresses.http.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def closed_after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: bytes) -> None:
    """Send this again and again; the other side has to hang up soon."""
    with suppress(ConnectionError):
        for _ in range(1000):
            writer.write(more)
            await writer.drain()
            if reader.at_eof():
                return
        raise AssertionError("all of it was taken")


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


async def whole_answer(reader: asyncio.StreamReader) -> int:
    """Its status; the next thing to be read is what comes after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
    return int(head.split()[1])


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many headers", "one without an end"])
async def test_an_endless_head(line: bytes) -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(HEAD + b"z: " + line * (connection_limits.MAX_HEAD_BYTES // len(line) + 1))
        assert await status(reader) == 431
        assert b"connection: close" in await reader.read()


async def test_a_head_that_is_large_but_not_too_large() -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        for _ in range(3):  # each request on a connection has the whole of it
            writer.write(HEAD + b"x: " + b"y" * (connection_limits.MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
            assert await status(reader) == 200
            await reader.readuntil(b"}")


@pytest.mark.parametrize("begun", [b"", HEAD], ids=["nothing", "half of it"])
async def test_a_head_that_does_not_come(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(begun)
        assert await status(reader) == 408
        assert await reader.read() is not None


async def test_a_second_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert await status(reader) == 200
        await reader.readuntil(b"}")
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(HEAD)
        assert await status(reader) == 408


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many trailers", "one without an end"])
async def test_endless_trailers(line: bytes) -> None:
    """On a route that reads no body, and on one that does."""
    begun = b" HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nz: "
    async with open_stack(counts) as stack:
        for method in (b"GET /version", b"POST /v1/completions"):
            async with connected(stack) as (reader, writer):
                writer.write(method + begun + line)
                await closed_after(reader, writer, line * (connection_limits.MAX_HEAD_BYTES // len(line)))


async def test_what_is_between_the_chunks_of_a_body_has_an_end() -> None:
    async with open_stack(counts) as stack, connected(stack) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"expect: 100-continue\r\n\r\n")
        assert await status(reader) == 100
        await reader.readline()
        writer.write(b"1;" + b"x" * connection_limits.MAX_HEAD_BYTES)
        assert await status(reader) == 431


async def test_trailers_are_no_headers() -> None:
    """And a body may come in any number of parts, and another request after it."""
    async with open_stack(counts) as stack, connected(stack) as (reader, writer):
        for size in (connection_limits.MAX_HEAD_BYTES, 1, 1):
            whole = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * size}).encode()
            parts = b"".join(b"8;z=1\r\n%-8b\r\n" % whole[at : at + 8] for at in range(0, len(whole), 8))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(parts + b"0\r\nx-session-id: trailer\r\n\r\n")
            assert await whole_answer(reader) == 200
        assert 'affinity="session"' not in (await stack.http.get("/metrics")).text


LATE = {
    "an empty line": (b"\r\n", b"\r\n"),
    "a body that nobody asked for": (b"content-length: 10\r\n\r\n", b"a"),
    "trailers that nobody asked for": (b"transfer-encoding: chunked\r\n\r\n", b"0\r\nx: y"),
}


@pytest.mark.parametrize("case", LATE)
async def test_what_begins_after_an_answer_has_to_end(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn stops its timer of idle connections with the first byte, and starts it with an answer."""
    end_of_head, late = LATE[case]
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(HEAD + end_of_head)
        assert await whole_answer(reader) == 200
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(late)
        async with asyncio.timeout(10.0):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408" if case == "an empty line" else b"")
            await reader.read()


async def test_an_early_answer_leaves_the_connection_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused before the end of the body may go on sending it, and try again. Then it is an idle connection."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    async with open_stack(counts) as stack, connected(stack) as (reader, writer):
        for _ in range(3):
            writer.write(HEAD + b"content-length: 200000\r\n\r\n")
            assert await whole_answer(reader) == 200
            writer.write(b"x" * 200000)
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""


async def test_a_line_too_many_does_not_end_an_answer_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the beginning of the next request."""
    async with open_stack(counts) as stack, connected(stack) as (reader, writer):
        stack.decoder.gate.clear()
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while not stack.decoder.requests:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(b"\r\n" + HEAD)
        await asyncio.sleep(3 * SOON_S)
        stack.decoder.gate.set()
        assert await status(reader) == 200


async def test_one_connection_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets 503 with Retry-After; probes and earlier connections are served."""
    async with open_stack(counts) as stack:
        body = {"prompt": "x", "max_tokens": 1}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 1)
        async with httpx.AsyncClient(base_url=stack.http.base_url) as late:
            refused = await late.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "crowded"
            probed = await late.get("/health")
            assert (probed.status_code, probed.headers["connection"]) == (200, "close")
        metrics = (await stack.http.get("/metrics")).text
        assert 'paceline_rejections_total{model_name="pydoc",reason="connections"} 1.0' in metrics
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200


async def test_a_body_that_does_not_come() -> None:
    async with (
        open_stack(counts, limits=AdmissionLimits(max_body_s=SOON_S)) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 100\r\n\r\n{")
        assert await status(reader) == 408
        answer = await reader.read()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"


async def test_large_bodies_that_come_slowly_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_BODIES_BYTES", 2**18)
    monkeypatch.setattr(admission, "SMALL_BODY_BYTES", 2**12)
    large = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 200000\r\n\r\n"
    async with open_stack(counts, limits=AdmissionLimits(max_body_bytes=2**18)) as stack, AsyncExitStack() as clients:
        capacity = stack.model.capacity
        for number in (1, 2):
            reader, writer = await clients.enter_async_context(connected(stack))
            writer.write(large + b" " * 150_000)
            while number == 1 and capacity.bytes_reading < 150_000:
                await asyncio.sleep(SOON_S)
        assert await status(reader) == 429
        assert (await stack.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (
            'paceline_rejections_total{model_name="pydoc",reason="bodies"} 1.0'
            in (await stack.http.get("/metrics")).text
        )
        assert capacity.bytes_reading == 150_000
    assert capacity.bytes_reading == 0


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its request is cancelled at the target, and its connection is closed."""
    monkeypatch.setattr(event_stream, "CLIENT_READ_TIMEOUT_S", SOON_S)
    lost = asyncio.Event()

    class Watched(connection_limits.LimitedHttpProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    monkeypatch.setattr(server, "LimitedHttpProtocol", Watched)
    body = json.dumps({"prompt": "x", "n": 128, "max_tokens": 100, "stream": True, "logprobs": 20}).encode()
    async with open_stack(counts) as stack:
        host, port = stack.addresses.http.rsplit(":", 1)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
            async with asyncio.timeout(60.0):
                await lost.wait()
                while not stack.decoder.requests or stack.model.queue.in_flight:
                    await asyncio.sleep(0.02)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_does_not_read_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over HTTP. The client's options stop gRPC from reading ahead."""
    monkeypatch.setattr(event_stream, "CLIENT_READ_TIMEOUT_S", SOON_S)
    options = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    request = pb.GenerateRequest(text="x", sampling=pb.GenerateRequest.Sampling(max_tokens=100))
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 90
        async with grpc.aio.insecure_channel(stack.addresses.grpc, options=options) as channel:
            unread = InferenceServiceStub(channel).Generate(request)
            async with asyncio.timeout(10.0):
                await stack.decoder.cancelled.get()
                while stack.model.capacity.in_flight:
                    await asyncio.sleep(0.01)
                with pytest.raises(grpc.aio.AioRpcError, match="not read in time") as error:
                    async for _ in unread:
                        pass
                assert error.value.code() is grpc.StatusCode.CANCELLED
        assert 'endpoint="Generate",status="CANCELLED"' in (await stack.http.get("/metrics")).text


async def test_a_message_over_grpc_that_is_too_large() -> None:
    async with open_stack(counts, limits=AdmissionLimits(max_body_bytes=10_000)) as stack:
        async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x" * 20_000)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"bad_words": ["x" * 1025]}, "bad_words[0]"),
        ({"bad_words": ["x" * 1024] * 17}, "bad_words"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"n": 129}, "n"),
    ],
)
async def test_fields_that_are_too_large(fields: dict[str, Any], param: str) -> None:
    async with open_stack(counts) as stack:
        answer = await stack.http.post("/v1/completions", json={"prompt": "x"} | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert stack.decoder.requests == []


async def test_json_that_is_too_deep() -> None:
    async with open_stack(counts) as stack:
        deep = '{"prompt": "x", "metadata": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}"
        answer = await stack.http.post("/v1/completions", content=deep)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


def test_the_tests_that_the_manual_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?", MANUAL.read_text())
    assert len(named) >= 15
    for file, function in named:
        [path] = MANUAL.parents[1].glob(f"tests/*/{file}")
        assert f"def {function}" in path.read_text()


def limits() -> list[tuple[str, str]]:
    """The rows of the manual's table: the value and the name of its constant."""
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+)[^|]* \| `([\w.]+)`[^|]* \|$", MANUAL.read_text(), re.MULTILINE)
    return [(number.replace(",", ""), name) for number, name in rows]


def test_the_manual_s_limits_are_the_code_s() -> None:
    assert len(limits()) >= 20
    for number, path in limits():
        module, _, name = path.rpartition(".")
        where = AdmissionLimits() if module.endswith(".AdmissionLimits") else import_module(module)
        assert float(number) == getattr(where, name), path


def request(*headers: bytes, body: bytes = b'{"prompt": "x", "max_tokens": 2}') -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", *headers, b"content-type: text/plain", b"", body]
    return b"\r\n".join(lines)


LENGTH = b"content-length: 32"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([b"host: here", LENGTH], 200),
        ([b"host: here", LENGTH, b"origin: http://here"], 200),
        ([b"host: here", LENGTH, b"origin: https://other.example"], 403),
        ([b"host: here", LENGTH, b"origin: null"], 403),
        ([b"host: here", LENGTH, b"origin: https://friend.example"], 200),
        ([b"host: here", b"host: there", LENGTH], 400),
        ([b"host: here", b"transfer-encoding: identity, chunked"], 400),
    ],
)
async def test_pages_of_other_sites_and_doubtful_framing(headers: list[bytes], expected: int) -> None:
    """A browser sends plain text to any site without a preflight request."""
    async with (
        open_stack(counts, allow_origin=["https://friend.example"]) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(request(*headers))
        assert await status(reader) == expected


async def test_no_page_of_another_site_may_by_default() -> None:
    async with open_stack(counts) as stack:
        for origin, expected in (("https://friend.example", 403), (str(stack.http.base_url), 200)):
            answer = await stack.http.post("/v1/completions", json={"prompt": "x"}, headers={"origin": origin})
            assert answer.status_code == expected
        assert (await stack.http.get("/v1/models", headers={"origin": "https://friend.example"})).status_code == 200


async def test_a_preflight_request_names_the_allowed_sites() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with open_stack(counts, allow_origin=["https://friend.example"]) as stack:
        for origin, allowed in (("https://friend.example", "https://friend.example"), ("https://x.example", None)):
            answer = await stack.http.options("/v1/completions", headers={"origin": origin, **asked})
            assert answer.headers.get("access-control-allow-origin") == allowed


async def test_an_answer_s_body_does_not_wait_for_its_head_to_be_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer over a connection that was kept once took 40 ms."""
    begun: list[socket.socket] = []
    made = connection_limits.LimitedHttpProtocol.connection_made

    def note(protocol: connection_limits.LimitedHttpProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        begun.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(connection_limits.LimitedHttpProtocol, "connection_made", note)
    async with open_stack() as stack, connected(stack):
        while not begun:
            await asyncio.sleep(0.01)
        assert begun[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_every_answer_has_a_name() -> None:
    async with open_stack(counts) as stack:
        for path in ("/version", "/nowhere", "/v1/models"):
            given = await stack.http.get(path, headers={"x-request-id": "mine-1"})
            new = await stack.http.get(path)
            assert given.headers["x-request-id"] == "mine-1"
            assert len(new.headers["x-request-id"]) == 32
        strange = await stack.http.get("/version", headers={"x-request-id": "x" * 200})
        assert len(strange.headers["x-request-id"]) == 32


async def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 8 MB once took half a gigabyte and ten seconds, to be refused then."""
    longest = TOKENIZER.longest_token
    assert longest is not None
    text = "ab" * (CONTEXT * longest // 2 + 1)
    monkeypatch.setattr(TOKENIZER.__class__, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    async with open_stack(counts) as stack:
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["x", text]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            answer = await stack.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_huge_texts_are_encoded_one_at_a_time_and_delay_no_other_text() -> None:
    threads, held, running, most = EncodingThreads(), threading.Event(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        held.wait()
        running -= 1

    huge = [asyncio.create_task(threads.run(HUGE_TEXT, work)) for _ in range(MAX_WAITING_HUGE)]
    while not running:
        await asyncio.sleep(0.01)
    assert await threads.run(HUGE_TEXT - 1, lambda: 1) + await threads.run(1, lambda: 2) == 3
    with pytest.raises(OverloadedError, match="16 texts as large wait"):
        await threads.run(HUGE_TEXT, work)
    held.set()
    await asyncio.gather(*huge)
    assert most == 1
    await threads.run(HUGE_TEXT, work)
