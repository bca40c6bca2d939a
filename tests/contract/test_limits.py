"""Limits on what HTTP clients send, and how slowly, and their values in the manual. Over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
import threading
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from pathlib import Path

import grpc
import httpx
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline_services.gateway import server
from paceline_services.gateway.api_errors import OverloadedError
from paceline_services.gateway.generation import admission
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.generation.prompt_encoding import HUGE_TEXT, MAX_WAITING_HUGE, EncodingThreads
from paceline_services.gateway.http import connection_limits, event_stream
from paceline_services.gateway.http.connection_limits import MAX_HEAD_BYTES
from tests.helpers.openai_stack import counts, open_stack, refusal
from tests.helpers.waiting import until

MANUAL = Path(__file__).parents[2] / "docs" / "security.md"
SOON_S = 0.05
HEAD = b"GET /version HTTP/1.1\r\nhost: here\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


async def whole_answer(reader: asyncio.StreamReader) -> int:
    """Its status. What is read next comes after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
    return int(head.split()[1])


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many headers", "one without an end"])
async def test_an_endless_head(line: bytes) -> None:
    async with open_stack() as stack, stack.connection() as (reader, writer):
        writer.write(HEAD + b"z: " + line * (MAX_HEAD_BYTES // len(line) + 1))
        assert await status(reader) == 431
        assert b"connection: close" in await reader.read()


async def test_a_head_that_is_large_but_not_too_large() -> None:
    async with open_stack() as stack, stack.connection() as (reader, writer):
        for _ in range(3):  # each request on a connection has the whole of it
            writer.write(HEAD + b"x: " + b"y" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
            assert await whole_answer(reader) == 200


@pytest.mark.parametrize(
    ("answered", "begun"),
    [(b"", b""), (b"", HEAD), (HEAD + b"\r\n", HEAD), (HEAD + b"\r\n", b"\r\n")],
    ids=["nothing", "half of it", "half of a second one", "an empty line"],
)
async def test_a_head_that_does_not_come(answered: bytes, begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn stops its timer of idle connections with the first byte, and starts it with an answer."""
    if not answered:
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
    async with open_stack() as stack, stack.connection() as (reader, writer):
        writer.write(answered)
        if answered:
            assert await whole_answer(reader) == 200
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(begun)
        async with asyncio.timeout(10.0):
            assert await status(reader) == 408
            await reader.read()


@pytest.mark.parametrize(
    ("end_of_head", "late"),
    [(b"content-length: 10\r\n\r\n", b"a"), (CHUNKED + b"\r\n", b"0\r\nx: y")],
    ids=["body", "trailers"],
)
async def test_what_nobody_asked_for_has_to_end_after_the_answer(
    end_of_head: bytes, late: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stack() as stack, stack.connection() as (reader, writer):
        writer.write(HEAD + end_of_head)
        assert await whole_answer(reader) == 200
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(late)
        async with asyncio.timeout(10.0):
            await reader.read()


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many trailers", "one without an end"])
async def test_endless_trailers(line: bytes) -> None:
    """On a route that reads no body, and on one that does."""
    async with open_stack(counts) as stack:
        for head in (HEAD, POST):
            async with stack.connection() as (reader, writer):
                writer.write(head + CHUNKED + b"\r\n1\r\n{\r\n0\r\nz: " + line)
                with suppress(ConnectionError):
                    for _ in range(1000):
                        writer.write(line * (MAX_HEAD_BYTES // len(line)))
                        await writer.drain()
                        if reader.at_eof():
                            break
                    else:
                        raise AssertionError("all of it was taken")


async def test_what_is_between_the_chunks_of_a_body_has_an_end() -> None:
    async with open_stack(counts) as stack, stack.connection() as (reader, writer):
        writer.write(POST + CHUNKED + b"expect: 100-continue\r\n\r\n")
        assert await status(reader) == 100
        await reader.readline()
        writer.write(b"1;" + b"x" * MAX_HEAD_BYTES)
        assert await status(reader) == 431


async def test_trailers_are_no_headers() -> None:
    """And a body may come in any number of parts, and another request after it."""
    async with open_stack(counts) as stack, stack.connection() as (reader, writer):
        for size in (MAX_HEAD_BYTES, 1, 1):
            whole = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * size}).encode()
            parts = b"".join(b"8;z=1\r\n%-8b\r\n" % whole[at : at + 8] for at in range(0, len(whole), 8))
            writer.write(POST + CHUNKED + b"\r\n" + parts + b"0\r\nx-session-id: trailer\r\n\r\n")
            assert await whole_answer(reader) == 200
        assert 'affinity="session"' not in await stack.metrics()


async def test_an_early_answer_leaves_the_connection_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused before the end of the body may go on sending it, and try again. Then it is an idle connection."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    async with open_stack(counts) as stack, stack.connection() as (reader, writer):
        for _ in range(3):
            writer.write(HEAD + b"content-length: 200000\r\n\r\n")
            assert await whole_answer(reader) == 200
            writer.write(b"x" * 200000)
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""


async def test_a_line_too_many_does_not_end_an_answer_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the beginning of the next request."""
    async with open_stack(counts) as stack, stack.connection() as (reader, writer):
        stack.decoder.gate.clear()
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: stack.decoder.requests)
        monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", SOON_S)
        writer.write(b"\r\n" + HEAD)
        await asyncio.sleep(3 * SOON_S)
        stack.decoder.gate.set()
        assert await status(reader) == 200


async def test_one_connection_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets 503 with Retry-After; probes and earlier connections are served."""
    async with open_stack(counts) as stack:
        assert (await stack.complete()).status_code == 200
        monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 1)
        async with httpx.AsyncClient(base_url=stack.http.base_url) as late:
            refused = await late.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "crowded"
            probed = await late.get("/health")
            assert (probed.status_code, probed.headers["connection"]) == (200, "close")
        assert 'paceline_rejections_total{model_name="pydoc",reason="connections"} 1.0' in await stack.metrics()
        assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_a_compressed_body_is_refused_by_its_encoding(path: str) -> None:
    async with open_stack(counts) as stack:
        packed = gzip.compress(b"{}")
        refused = await stack.http.post(path, content=packed, headers={"content-encoding": "gzip"})
        assert refused.status_code == 415
        assert "content-encoding gzip is not read" in refused.json()["error"]["message"]
        assert refused.headers["accept-encoding"] == "identity"
        body, headers = {"prompt": "x", "max_tokens": 1}, {"content-encoding": "identity"}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_a_body_that_does_not_come() -> None:
    limits = AdmissionLimits(max_body_s=SOON_S)
    async with open_stack(counts, limits=limits) as stack, stack.connection() as (reader, writer):
        writer.write(POST + b"content-length: 100\r\n\r\n{")
        assert await status(reader) == 408
        answer = await reader.read()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"


async def test_large_bodies_that_come_slowly_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_BODIES_BYTES", 2**18)
    monkeypatch.setattr(admission, "SMALL_BODY_BYTES", 2**12)
    async with open_stack(counts, limits=AdmissionLimits(max_body_bytes=2**18)) as stack, AsyncExitStack() as clients:
        capacity = stack.model.capacity
        for number in (1, 2):
            reader, writer = await clients.enter_async_context(stack.connection())
            writer.write(POST + b"content-length: 200000\r\n\r\n" + b" " * 150_000)
            if number == 1:
                await until(lambda: capacity.bytes_reading >= 150_000)
        assert await status(reader) == 429
        assert (await stack.complete()).status_code == 200
        assert 'paceline_rejections_total{model_name="pydoc",reason="bodies"} 1.0' in await stack.metrics()
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
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(60.0):
                await lost.wait()
            await until(lambda: stack.decoder.requests)
            await stack.idle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_does_not_read_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over HTTP. The client's options stop gRPC from reading ahead."""
    monkeypatch.setattr(event_stream, "CLIENT_READ_TIMEOUT_S", SOON_S)
    options = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with open_stack(counts, burst=1) as stack, stack.inference(options) as stub:
        stack.decoder.hold_after = 90
        unread = stub.Generate(pb.GenerateRequest(text="x", sampling=pb.GenerateRequest.Sampling(max_tokens=100)))
        async with asyncio.timeout(10.0):
            await stack.decoder.cancelled.get()
            await stack.idle()
            with pytest.raises(grpc.aio.AioRpcError, match="not read in time") as error:
                async for _ in unread:
                    pass
        assert error.value.code() is grpc.StatusCode.CANCELLED
        assert 'endpoint="Generate",status="CANCELLED"' in await stack.metrics()


async def test_a_message_over_grpc_that_is_too_large() -> None:
    async with (
        open_stack(counts, limits=AdmissionLimits(max_body_bytes=10_000)) as stack,
        stack.inference() as stub,
    ):
        refused = await refusal(stub, pb.GenerateRequest(text="x" * 20_000))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_tests_that_the_manual_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?", MANUAL.read_text())
    assert len(named) >= 15
    for file, function in named:
        [path] = MANUAL.parents[1].glob(f"tests/**/{file}")
        assert f"def {function}" in path.read_text()


def test_the_manual_s_limits_are_the_code_s() -> None:
    """The rows of the manual's table have the value and the name of its constant."""
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+)[^|]* \| `([\w.]+)`[^|]* \|$", MANUAL.read_text(), re.MULTILINE)
    assert len(rows) >= 20
    for number, path in rows:
        module, _, name = path.rpartition(".")
        where = AdmissionLimits() if module.endswith(".AdmissionLimits") else import_module(module)
        assert float(number.replace(",", "")) == getattr(where, name), path


FRIEND = "https://friend.example"
LENGTH = b"content-length: 32\r\n"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (LENGTH, 200),
        (LENGTH + b"origin: http://here\r\n", 200),
        (LENGTH + b"origin: https://other.example\r\n", 403),
        (LENGTH + b"origin: null\r\n", 403),
        (LENGTH + b"origin: https://friend.example\r\n", 200),
        (LENGTH + b"host: there\r\n", 400),
        (b"transfer-encoding: identity, chunked\r\n", 400),
    ],
)
async def test_pages_of_other_sites_and_doubtful_framing(headers: bytes, expected: int) -> None:
    """A browser sends plain text to any site without a preflight request."""
    body = b'{"prompt": "x", "max_tokens": 2}'
    async with open_stack(counts, allow_origin=[FRIEND]) as stack, stack.connection() as (reader, writer):
        writer.write(POST + headers + b"content-type: text/plain\r\n\r\n" + body)
        assert await status(reader) == expected


@pytest.mark.parametrize("allowed", [[], [FRIEND]], ids=["by default", "allowed"])
async def test_pages_of_sites_that_were_named_may_use_the_gateway(allowed: list[str]) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with open_stack(counts, allow_origin=allowed) as stack:
        for origin in (FRIEND, "https://x.example", str(stack.http.base_url)):
            answer = await stack.complete(headers={"origin": origin})
            assert answer.status_code == (200 if origin in (*allowed, stack.http.base_url) else 403)
            preflight = await stack.http.options("/v1/completions", headers={"origin": origin, **asked})
            granted = preflight.headers.get("access-control-allow-origin")
            assert granted == (origin if origin in allowed else None)
            assert (await stack.http.get("/v1/models", headers={"origin": origin})).status_code == 200


async def test_an_answer_s_body_does_not_wait_for_its_head_to_be_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer over a connection that was kept once took 40 ms."""
    begun: list[socket.socket] = []
    made = connection_limits.LimitedHttpProtocol.connection_made

    def note(protocol: connection_limits.LimitedHttpProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        begun.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(connection_limits.LimitedHttpProtocol, "connection_made", note)
    async with open_stack() as stack, stack.connection():
        await until(lambda: begun)
        assert begun[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_every_answer_has_a_name() -> None:
    async with open_stack(counts) as stack:
        for path in ("/version", "/nowhere", "/v1/models"):
            for asked, given in (({"x-request-id": "mine-1"}, 6), ({}, 32), ({"x-request-id": "x" * 200}, 32)):
                name = (await stack.http.get(path, headers=asked)).headers["x-request-id"]
                assert len(name) == given
                assert given == 32 or name == "mine-1"


async def test_huge_texts_are_encoded_one_at_a_time_and_delay_no_other_text() -> None:
    threads, held, running, most = EncodingThreads(), threading.Event(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        held.wait()
        running -= 1

    huge = [asyncio.create_task(threads.run(HUGE_TEXT, work)) for _ in range(MAX_WAITING_HUGE)]
    await until(lambda: running)
    assert await threads.run(HUGE_TEXT - 1, lambda: 1) + await threads.run(1, lambda: 2) == 3
    with pytest.raises(OverloadedError, match="16 texts as large wait"):
        await threads.run(HUGE_TEXT, work)
    held.set()
    await asyncio.gather(*huge)
    assert most == 1
    await threads.run(HUGE_TEXT, work)
