"""`GrpcServer`: status codes of exceptions, invalid messages and addresses."""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.grpc_server import GrpcServer, PortInUseError
from paceline.wire.link_errors import Congested, Draining, WireError
from tests.helpers.workers import DRAFT_SERVICE


class FullError(Exception):
    """An error with a status of the service's own."""


class Service(draft_pb2_grpc.DraftServiceServicer):
    """Reads its requests, and then raises the error, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DraftServiceDescribeResponse:  # noqa: N802
        if self._error:
            raise self._error
        return draft_pb2.DraftServiceDescribeResponse()

    async def Grow(self, incoming: Any, context: Any) -> AsyncIterator[draft_pb2.GrowthFrame]:  # noqa: N802
        async for _ in incoming:
            yield draft_pb2.GrowthFrame()
            if self._error:
                raise self._error


@asynccontextmanager
async def channel_to(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1", 0, {FullError: grpc.StatusCode.ALREADY_EXISTS})
    server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, service, DRAFT_SERVICE)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("error", "status", "details"),
    [
        (WireError("tokens: empty"), grpc.StatusCode.INVALID_ARGUMENT, "tokens: empty"),
        (Draining("leaving"), grpc.StatusCode.UNAVAILABLE, "leaving"),
        (Congested("slow"), grpc.StatusCode.RESOURCE_EXHAUSTED, "slow"),
        (FullError("own"), grpc.StatusCode.ALREADY_EXISTS, "own"),
        (KeyError("secret"), grpc.StatusCode.INTERNAL, "internal error: KeyError"),
    ],
)
async def test_status_of_an_exception(
    error: Exception, status: grpc.StatusCode, details: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error is logged with its traceback."""
    async with channel_to(Service(error)) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Describe(draft_pb2.DraftServiceDescribeRequest())
        assert (raised.value.code(), raised.value.details()) == (status, details)
        call = stub.Grow()
        await call.write(draft_pb2.DraftFrame())
        assert await call.read() == draft_pb2.GrowthFrame()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (status, details)
    logged = [each.exc_info[1] for each in caplog.records if each.levelno == logging.ERROR and each.exc_info]
    assert logged == ([error, error] if status is grpc.StatusCode.INTERNAL else [])


async def test_a_taken_port_is_an_error() -> None:
    first = GrpcServer("127.0.0.1", 0)
    await first.start()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"cannot listen on 127.0.0.1:{port}"):
        await GrpcServer("127.0.0.1", port).start()
    await first.stop()


async def test_an_ipv6_address_is_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = GrpcServer("::1", 0)
    address = await server.start()
    assert re.fullmatch(r"\[::1\]:[1-9]\d*", address)
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10.0)
    await server.stop()


@pytest.mark.parametrize(
    "method",
    [
        "/paceline.v1.DraftService/Describe",
        "/paceline.v1.DraftService/Grow",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_bytes_that_are_no_message(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with channel_to(Service()) as channel:
        call = channel.stream_stream(method)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "3 bytes that are no message of this method"
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
