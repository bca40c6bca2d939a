"""The life of a gateway process: open everything, serve until told to stop, finish what runs, close everything."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.api_keys import KeyFileError
from paceline.state.state_store import StateStore, open_store
from paceline.state.worker_registry import WorkerRecord
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import ChatTemplateError, Tokenizer
from paceline.tls import Certificates, ServerContext
from paceline.wire.grpc_server import GrpcServer, PortInUseError
from paceline_services.gateway.admission import AdmissionLimits, Capacity
from paceline_services.gateway.auth import Authenticator
from paceline_services.gateway.grpc.inference_servicer import create_server
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.connection_limits import LimitedHttpProtocol
from paceline_services.gateway.openai.http_app import create_app
from paceline_services.gateway.routing.fleet import open_fleet
from paceline_services.gateway.served_model import ServedModel
from paceline_services.gateway.structured_output import GrammarChecks
from paceline_services.service_entrypoint import ServiceStartError

log = logging.getLogger(__name__)

BACKLOG = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEEP_ALIVE_S = 75
"""Clients and load balancers give up an idle connection after 5 to 60 seconds. They have to be the first: a request
that meets a connection as it closes here is lost."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`model`: where the tokenizer is. `drain_s`: how long requests may go on after the gateway was told to stop.

    `more_models`: further ones, each with the name by which it is served. `aliases`: further names of models.
    """

    model: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 0
    drain_s: float = 60.0
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    more_models: Sequence[tuple[str, str]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    api_keys: Path | None = None
    """Who may come in; None: anyone."""
    allow_origin: Sequence[str] = ()
    """Sites whose pages may use this server from a browser."""
    edge_tls: Certificates | None = None
    """What clients are shown; None: HTTP and gRPC are in the clear."""
    tls: Certificates | None = None
    """What targets and Redis are shown."""
    worker_id: str = field(default_factory=lambda: f"gateway-{secrets.token_hex(3)}")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running gateway listens, as host:port."""

    http: str
    grpc: str


async def serve(settings: GatewaySettings, redis_url: str | None, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises what `paceline_services.service_entrypoint.run_service` tells in one line."""
    async with open_store(redis_url, tls=settings.tls) as store, running(settings, store) as (models, addresses):
        scheme = "https" if settings.edge_tls else "http"
        log.info("gateway ready on %s://%s", scheme, addresses.http, extra={"grpc": addresses.grpc})
        await stop.wait()
        log.info("gateway stops", extra={"in_flight": models.capacity.in_flight})


@asynccontextmanager
async def running(settings: GatewaySettings, store: StateStore) -> AsyncIterator[tuple[ModelDirectory, Addresses]]:
    """A gateway that serves for as long as the context lasts; at its end, requests that run are finished."""
    places = [(settings.model, settings.served_model_name), *settings.more_models]
    tokenizers = {name: await asyncio.to_thread(_load_tokenizer, place) for place, name in places}
    metrics = CollectorRegistry()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port))
        series = GatewayMetrics(metrics)
        callers = _authenticator(settings, series)
        models = await _open_models(tokenizers, settings, store, series, stack)
        grpc_server = await stack.enter_async_context(_grpc_server(settings, models, callers))
        app = create_app(models, metrics, callers, settings.allow_origin)
        await stack.enter_async_context(_http_server(app, listener, settings.edge_tls))
        addresses = Addresses(f"{settings.host}:{listener.getsockname()[1]}", grpc_server.address)
        record = _record(settings.worker_id, addresses, models)
        async with store.registration(record, lambda: {"running": models.capacity.in_flight}):
            yield models, addresses
        await grpc_server.drain()
        await models.capacity.drain(settings.drain_s)


async def _open_models(
    tokenizers: Mapping[str, Tokenizer],
    settings: GatewaySettings,
    store: StateStore,
    metrics: GatewayMetrics,
    stack: AsyncExitStack,
) -> ModelDirectory:
    """A fleet for each; their links are closed by `stack`."""
    room, grammars = Capacity(settings.limits), GrammarChecks()
    stack.push_async_callback(grammars.close)
    gateways = []
    for name, tokenizer in tokenizers.items():
        others = tokenizers.keys() - {name}
        fleet = await stack.enter_async_context(open_fleet(store, name, tokenizer.fingerprint, others, settings.tls))
        gateways.append(ServedModel(name, tokenizer, fleet, metrics, room, grammars))
    return ModelDirectory(gateways, settings.aliases)


def _record(worker_id: str, addresses: Addresses, models: ModelDirectory) -> WorkerRecord:
    names = ",".join(gateway.model for gateway in models)
    fingerprints = ",".join(gateway.tokenizer.fingerprint for gateway in models)
    return WorkerRecord("gateway", worker_id, addresses.http, names, "", fingerprints, time.time())


class _HttpServer(uvicorn.Server):
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
async def _http_server(app: ASGIApp, listener: socket.socket, tls: Certificates | None) -> AsyncIterator[None]:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells what this module tells
    context = None if tls is None else ServerContext(tls).context
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        ssl_context_factory=None if context is None else lambda *_: context,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    await server.listening.wait()
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _grpc_server(
    settings: GatewaySettings, models: ModelDirectory, callers: Authenticator
) -> AsyncIterator[GrpcServer]:
    server = create_server(settings.host, settings.grpc_port, models, callers, settings.edge_tls)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def _authenticator(settings: GatewaySettings, metrics: GatewayMetrics) -> Authenticator:
    try:
        callers = Authenticator(settings.api_keys, metrics.keys)
    except KeyFileError as error:
        raise ServiceStartError(f"--api-keys: {error}; make one with `paceline keys add NAME --file FILE`") from error
    if callers.requires_key and settings.edge_tls is None and settings.host not in LOOPBACK:
        log.warning("API keys travel in the clear: give --ssl-certfile and --ssl-keyfile, or put a proxy in front")
    return callers


def _load_tokenizer(model: str) -> Tokenizer:
    """Ready for its first request: what it would work out then is worked out now."""
    try:
        tokenizer = Tokenizer.load(model)
        tokenizer.prepare()
    except (ChatTemplateError, ValueError) as error:
        raise ServiceStartError(f"--model {model}: {error}") from error
    return tokenizer


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything else is opened: a port that is taken is found out at once."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another one with --port, or 0 for any"
        ) from error
