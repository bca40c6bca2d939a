"""The life of a gateway process: open everything, serve until stopped, finish the running requests, close."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.api_keys import KeyFileError
from paceline.launcher import StartError
from paceline.model_defaults import model_length, sampling_defaults
from paceline.parsing.output_format import AUTO, OutputFormat, choose_format
from paceline.parsing.reasoning import REASONING_WORDS
from paceline.state.state_store import StateStore, open_store
from paceline.state.worker_registry import WorkerRecord
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.text import ChatTemplateError, Tokenizer
from paceline.tls import Certificates, ServerContext
from paceline.wire.grpc_server import GrpcServer, PortInUseError
from paceline_services.gateway.auth import Authenticator
from paceline_services.gateway.generation.admission import Capacity
from paceline_services.gateway.generation.journal import Journals
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.running import RunningRequests
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.grpc.servicer import create_server
from paceline_services.gateway.http.connection_limits import LimitedHttpProtocol
from paceline_services.gateway.http_app import create_app
from paceline_services.gateway.pages.fleet_report import FleetReport
from paceline_services.gateway.responses.background import BackgroundResponses
from paceline_services.gateway.responses.generation import ResponseRequests
from paceline_services.gateway.responses.history import ResponseHistory
from paceline_services.gateway.routing.fleet import open_fleet
from paceline_services.gateway.settings import GatewaySettings
from paceline_services.gateway.structured.output import GrammarChecks
from paceline_services.service_entrypoint import open_tracing

log = logging.getLogger(__name__)

BACKLOG = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEEP_ALIVE_S = 75
"""Longer than the 5 to 60 seconds after which clients and load balancers close an idle connection: a request that
arrives on a connection as the gateway closes it is lost."""

FLUSH_S = 1
"""For the last bytes of responses, when the gateway stops."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a running gateway, as host:port."""

    http: str
    grpc: str


async def serve(settings: GatewaySettings, redis_url: str | None, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises the errors that `service_entrypoint.run_service` reports in one line."""
    with open_tracing("gateway", settings.worker_id, settings.otlp_traces_endpoint) as tracing:
        async with (
            open_store(redis_url, tls=settings.tls, records=settings.records) as store,
            running(settings, store, tracing) as (models, addresses),
        ):
            scheme = "https" if settings.edge_tls else "http"
            log.info("gateway ready on %s://%s", scheme, addresses.http, extra={"grpc": addresses.grpc})
            await stop.wait()
            log.info("gateway stops", extra={"in_flight": models.capacity.in_flight})


@asynccontextmanager
async def running(
    settings: GatewaySettings, store: StateStore, tracing: Tracing = NO_TRACING
) -> AsyncIterator[tuple[ModelDirectory, Addresses]]:
    """A gateway that serves until the context ends, which waits for the running requests."""
    load = partial(_load_tokenizer, chat_template=settings.chat_template)
    tokenizers = {name: await asyncio.to_thread(load, model) for name, model in settings.models.items()}
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port))
        metrics = GatewayMetrics(registry)
        authenticator = _authenticator(settings, metrics)
        models = await _open_models(tokenizers, settings, store, metrics, tracing, stack)
        grpc_server = await stack.enter_async_context(_grpc_server(settings, models, authenticator))
        report = FleetReport(models, store, settings.worker_id)
        journals = Journals(store, enabled=settings.records.resumable_s > 0)
        history = ResponseHistory(store, enabled=settings.records.response_s > 0)
        responses = ResponseRequests(models, history, journals)
        background = BackgroundResponses(responses, authenticator.client_named)
        app = create_app(registry, authenticator, report, responses, background, settings)
        await stack.enter_async_context(_http_server(app, listener, settings.edge_tls))
        addresses = Addresses(f"{settings.host}:{listener.getsockname()[1]}", grpc_server.address)
        record = _record(settings.worker_id, addresses, models)
        async with store.registration(record, lambda: models.load), background:
            yield models, addresses
            models.capacity.closing = True
        await grpc_server.drain()
        await models.capacity.drain(settings.drain_s)
        models.abort_all()


async def _open_models(
    tokenizers: Mapping[str, Tokenizer],
    settings: GatewaySettings,
    store: StateStore,
    metrics: GatewayMetrics,
    tracing: Tracing,
    stack: AsyncExitStack,
) -> ModelDirectory:
    """Opens a fleet for each model; `stack` closes them."""
    capacity, grammars = Capacity(settings.limits), GrammarChecks()
    stack.push_async_callback(grammars.close)
    recorder = await stack.enter_async_context(store.recorder())
    models = []
    for name, tokenizer in tokenizers.items():
        others = tokenizers.keys() - {name}
        fleet = await stack.enter_async_context(
            open_fleet(store, recorder, name, tokenizer.fingerprint, others, settings.tls)
        )
        output_format = _output_format(name, settings, tokenizer)
        shared = (metrics, capacity, grammars, output_format, tracing)
        defaults, length = _sampling_defaults(name, settings), model_length(settings.models[name])
        running = RunningRequests(name, recorder)
        models.append(ServedModel(name, tokenizer, fleet, *shared, defaults, length, running=running))
    return ModelDirectory(models, settings.aliases)


def _sampling_defaults(model: str, settings: GatewaySettings) -> Mapping[str, Any]:
    defaults = sampling_defaults(settings.models[model], settings.generation_config)
    if defaults:
        log.info("%s: requests have the sampling defaults of its generation_config.json", model, extra=defaults)
    return defaults


def _output_format(model: str, settings: GatewaySettings, tokenizer: Tokenizer) -> OutputFormat:
    template = tokenizer.template_for(tools=True)
    source = None if template is None else template.source
    try:
        chosen = choose_format(settings.tool_call_parser, settings.reasoning_parser, source)
    except ValueError as error:
        raise StartError(f"--tool-call-parser, --reasoning-parser: {error}") from error
    if chosen.reasoning is None and settings.reasoning_parser == AUTO and REASONING_WORDS.search(source or ""):
        log.warning(
            "%s: its chat template has reasoning with unknown markers, which stays in the content; "
            "--reasoning-parser can name them, or none",
            model,
        )
    return chosen


def _record(worker_id: str, addresses: Addresses, models: ModelDirectory) -> WorkerRecord:
    names = ",".join(each.model for each in models)
    fingerprints = ",".join(each.tokenizer.fingerprint for each in models)
    return WorkerRecord("gateway", worker_id, addresses.http, names, "", fingerprints, time.time())


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: this process stops its servers in order."""

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
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # this module logs the same
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
        timeout_graceful_shutdown=FLUSH_S,
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
    settings: GatewaySettings, models: ModelDirectory, authenticator: Authenticator
) -> AsyncIterator[GrpcServer]:
    server = create_server(settings.host, settings.grpc_port, models, authenticator, settings.edge_tls)
    try:
        await server.start()
        yield server
    finally:
        await server.stop(FLUSH_S)


def _authenticator(settings: GatewaySettings, metrics: GatewayMetrics) -> Authenticator:
    try:
        authenticator = Authenticator(settings.api_keys, metrics.keys)
    except KeyFileError as error:
        raise StartError(f"--api-keys: {error}; make one with `paceline keys add NAME --file FILE`") from error
    if authenticator.requires_key and settings.edge_tls is None and settings.host not in LOOPBACK:
        log.warning("API keys travel in plain text: give --ssl-certfile and --ssl-keyfile, or put a proxy in front")
    return authenticator


def _load_tokenizer(model: str, chat_template: str | None = None) -> Tokenizer:
    """A tokenizer whose tables are computed, so that no request waits for them."""
    tokenizer = Tokenizer.load(model)
    try:
        if chat_template is not None:
            tokenizer.use_chat_template(chat_template)
    except (ChatTemplateError, ValueError) as error:
        raise StartError(f"--chat-template, for {model}: {error}") from error
    try:
        tokenizer.prepare()
    except (ChatTemplateError, ValueError) as error:
        raise StartError(f"--model {model}: {error}") from error
    return tokenizer


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before anything else is opened, so that a port in use is reported at once."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another one with --port, or 0 for any"
        ) from error
