"""The life of a gateway process: open everything, serve until told to stop, finish what runs, close everything."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.state.registry import WorkerRecord
from paceline.state.store import Store, open_store
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import ChatTemplateError, Tokenizer
from paceline.wire.server import PortError, Server
from services.gateway.fleet import open_fleet
from services.gateway.gateway import Gateway, Limits
from services.gateway.grpc_api import create_server
from services.gateway.http import create_app
from services.process import StartError

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Clients and load balancers give up an idle connection after 5 to 60 seconds. They have to be the first: a request
that meets a connection as it closes here is lost."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`model`: where the tokenizer is. `drain_s`: how long requests may go on after the gateway was told to stop."""

    model: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 0
    drain_s: float = 60.0
    limits: Limits = field(default_factory=Limits)
    worker_id: str = field(default_factory=lambda: f"gateway-{secrets.token_hex(3)}")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running gateway listens, as host:port."""

    http: str
    grpc: str


async def serve(settings: Settings, redis_url: str | None, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises what `services.process.run` tells in one line."""
    async with open_store(redis_url) as store, running(settings, store) as (gateway, addresses):
        log.info("gateway ready on http://%s", addresses.http, extra={"grpc": addresses.grpc})
        await stop.wait()
        log.info("gateway stops", extra={"in_flight": gateway.in_flight})


@asynccontextmanager
async def running(settings: Settings, store: Store) -> AsyncIterator[tuple[Gateway, Addresses]]:
    """A gateway that serves for as long as the context lasts; at its end, requests that run are finished."""
    tokenizer = await asyncio.to_thread(_load_tokenizer, settings.model)
    metrics = CollectorRegistry()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port))
        name = settings.served_model_name
        fleet = await stack.enter_async_context(open_fleet(store, name, tokenizer.fingerprint))
        gateway = Gateway(name, tokenizer, fleet, GatewayMetrics(metrics), settings.limits)
        grpc_server = await stack.enter_async_context(_grpc_server(settings, gateway))
        await stack.enter_async_context(_http_server(create_app(gateway, metrics), listener))
        addresses = Addresses(f"{settings.host}:{listener.getsockname()[1]}", grpc_server.address)
        record = WorkerRecord(
            "gateway", settings.worker_id, addresses.http, name, "", tokenizer.fingerprint, time.time()
        )
        async with store.registration(record, lambda: {"running": gateway.in_flight}):
            yield gateway, addresses
        await grpc_server.drain()
        await gateway.drain(settings.drain_s)


class _Http(uvicorn.Server):
    """uvicorn, without its signal handling: the process has another server to stop, in order."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def _http_server(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells what this module tells
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _Http(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    await server.listening.wait()
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _grpc_server(settings: Settings, gateway: Gateway) -> AsyncIterator[Server]:
    server = create_server(settings.host, settings.grpc_port, gateway)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def _load_tokenizer(model: str) -> Tokenizer:
    """Ready for its first request: what it would work out then is worked out now."""
    try:
        tokenizer = Tokenizer.load(model)
        tokenizer.prepare()
    except (ChatTemplateError, ValueError) as error:
        raise StartError(f"--model {model}: {error}") from error
    return tokenizer


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything else is opened: a port that is taken is found out at once."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise PortError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another one with --port, or 0 for any"
        ) from error
