"""What an HTTP client may send, and how slowly; and that the manual says so. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from services.gateway import guard, streaming
from services.gateway.admission import Limits
from tests.contract.openai_stack import Stack, counts, open_stack

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


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many headers", "one without an end"])
async def test_an_endless_head(line: bytes) -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(HEAD + b"z: " + line * (guard.HEAD_BYTES // len(line) + 1))
        assert await status(reader) == 431
        assert b"connection: close" in await reader.read()


async def test_a_head_that_is_large_but_not_too_large() -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        for _ in range(3):  # each request on a connection has the whole of it
            writer.write(HEAD + b"x: " + b"y" * (guard.HEAD_BYTES - 100) + b"\r\n\r\n")
            assert await status(reader) == 200
            await reader.readuntil(b"}")


@pytest.mark.parametrize("begun", [b"", HEAD], ids=["nothing", "half of it"])
async def test_a_head_that_does_not_come(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_S", SOON_S)
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(begun)
        assert await status(reader) == 408
        assert await reader.read() is not None


async def test_a_second_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stack() as stack, connected(stack) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert await status(reader) == 200
        await reader.readuntil(b"}")
        monkeypatch.setattr(guard, "HEAD_S", SOON_S)
        writer.write(HEAD)
        assert await status(reader) == 408


async def test_a_body_that_does_not_come() -> None:
    async with open_stack(counts, limits=Limits(max_body_s=SOON_S)) as stack, connected(stack) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 100\r\n\r\n{")
        assert await status(reader) == 408
        answer = await reader.read()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is cancelled at the target: nobody generates into a full pipe."""
    monkeypatch.setattr(streaming, "READ_S", SOON_S)
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
                while not stack.decoder.submissions or stack.gateway.in_flight:
                    await asyncio.sleep(0.02)


async def test_a_message_over_grpc_that_is_too_large() -> None:
    async with open_stack(counts, limits=Limits(max_body_bytes=10_000)) as stack:
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
        assert stack.decoder.submissions == []


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
    """Of the manual's table: what it says, and where it says that this stands."""
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+)[^|]* \| `([\w.]+)`[^|]* \|$", MANUAL.read_text(), re.MULTILINE)
    return [(number.replace(",", ""), name) for number, name in rows]


def test_the_manual_s_limits_are_the_code_s() -> None:
    assert len(limits()) >= 20
    for number, place in limits():
        module, _, name = place.rpartition(".")
        where = Limits() if module.endswith(".Limits") else import_module(module)
        assert float(number) == getattr(where, name), place
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_does_not_read_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over HTTP. It has told gRPC to take nothing that it did not ask for."""
    monkeypatch.setattr(streaming, "READ_S", SOON_S)
    options = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    request = pb.GenerateRequest(text="x", sampling=pb.GenerateRequest.Sampling(max_tokens=100))
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 90
        async with grpc.aio.insecure_channel(stack.addresses.grpc, options=options) as channel:
            unread = InferenceServiceStub(channel).Generate(request)
            async with asyncio.timeout(10.0):
                await stack.decoder.cancelled.get()
                while stack.gateway.room.in_flight:
                    await asyncio.sleep(0.01)
                with pytest.raises(grpc.aio.AioRpcError, match="not read in time") as told:
                    async for _ in unread:
                        pass
                assert told.value.code() is grpc.StatusCode.CANCELLED
        assert 'endpoint="Generate",status="CANCELLED"' in (await stack.http.get("/metrics")).text
