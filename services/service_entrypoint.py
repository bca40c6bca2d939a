"""From a command line to an exit code, for all services; and the life of a target or draft worker.

Exit codes: 0: stopped as asked · 1: failed while serving, with a traceback in the log · 2: could not start, with one
line in the log that says what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar, get_args

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline.config.engine_config import Quantization
from paceline.config.validation_messages import first_error
from paceline.ipc.model_process import ModelProcess, model_process
from paceline.launcher import COULD_NOT_START, FAILED, StartError
from paceline.model_names import ModelNotFoundError
from paceline.state import StateError, StateStore, WorkerRecord, WorkerRegistration, open_store
from paceline.telemetry import logs
from paceline.telemetry.metrics_exporter import serve_metrics
from paceline.telemetry.tracing import Tracing
from paceline.tls import Certificates
from paceline.wire.grpc_server import GrpcServer, PortInUseError, Register
from paceline_services.tls_options import add_tls_options, service_certificates
from paceline_services.tracing_options import add_tracing_options, open_tracing

log = logging.getLogger(__name__)

REDIS_URL_VARIABLE = "PACELINE_REDIS_URL"
"""Environment variable for a URL with a password: every user of the machine can read command lines."""

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Worker:
    """What `serve_worker` serves: a target or draft worker whose model process is ready."""

    servicer: object
    register: Register
    service: ServiceDescriptor
    peer: str
    """The name that the certificates of its clients must have."""
    receive_bytes: int
    """Size of the largest message it accepts."""
    metrics: CollectorRegistry
    record: Callable[[str], WorkerRecord]
    """Its entry in the registry, by its address."""
    load: Callable[[], Mapping[str, float]]
    """Its load, for the registry."""
    drain: Callable[[WorkerRegistration], Awaitable[None]]
    """Ends its requests and streams. Called when its health is NOT_SERVING."""


BuildWorker: TypeAlias = Callable[
    [argparse.Namespace, ModelProcess, StateStore, Certificates | None, Tracing], AbstractAsyncContextManager[Worker]
]
"""Builds a worker around a model process that is ready, and closes it at the end of the context."""


async def serve_worker(
    kind: str,
    module: str,
    build: BuildWorker,
    options: argparse.Namespace,
    stop: asyncio.Event,
    python: str = sys.executable,
) -> None:
    """Start a worker's model process, `module`, and serve until `stop` is set or the process ends; then drain.

    `python` runs the process.

    Raises `StartError`, `StateError`, `PortInUseError`, and `ModelProcessDiedError` if the model process ended.
    """
    tls = service_certificates(options)
    async with AsyncExitStack() as stack:
        tracing = stack.enter_context(open_tracing(kind, options.worker_id, options.otlp_traces_endpoint))
        process = await stack.enter_async_context(model_process(module, _without_paths(options), python))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((process.ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not process.ready.done():
            return
        stopped.cancel()
        worker = await stack.enter_async_context(build(options, process, store, tls, tracing))
        server = GrpcServer(options.host, options.port, tls=tls, peer=worker.peer, receive_bytes=worker.receive_bytes)
        stack.enter_context(metrics_endpoint(worker.metrics, options, server))
        server.add(worker.register, worker.servicer, worker.service)
        stack.push_async_callback(server.stop)  # also after an error
        address = await server.start()
        record = worker.record(options.advertise or address)
        async with store.registration(record, worker.load) as registration:
            log.info("%s ready on %s", kind, address, extra={"numerics": record.numerics} if record.numerics else None)
            process.exited.add_done_callback(lambda _: stop.set())
            await stop.wait()
            await server.drain()
            await worker.drain(registration)
        await server.stop(grace_s=1.0)
        if process.exited.done():
            process.exited.result()  # raises
    log.info("%s stopped", kind)


def _without_paths(options: argparse.Namespace) -> argparse.Namespace:
    """With text instead: a path of Python 3.13 cannot be unpickled by an older Python, which may run the process."""
    given = vars(options)
    return argparse.Namespace(**{name: str(each) if isinstance(each, Path) else each for name, each in given.items()})


def positive_int(text: str) -> int:
    """Parse an option that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def parse_with_config_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse options from a `--config` file and from the command line, which takes precedence.

    Exits if either is invalid.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (first, parser):
        each.add_argument("--config", type=Path, metavar="FILE", help="options by name, YAML or TOML")
    file = first.parse_known_args(arguments)[0].config
    if file is None:
        return parser.parse_args(arguments)
    names = {option.removeprefix("--").replace("-", "_") for option in parser._option_string_actions}
    try:
        return parser.parse_args([*as_arguments(read(file, names - {"config", "help"})), *arguments])
    except ConfigFileError as error:
        parser.error(str(error))


def worker_parser(kind: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that target and draft workers share."""
    parser = argparse.ArgumentParser(prog=f"paceline {kind}", description=description, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument(
        "--advertise", metavar="HOST:PORT", help="address for other services; default: where it listens"
    )
    parser.add_argument(
        "--redis-url",
        default=os.environ.get(REDIS_URL_VARIABLE),
        help=f"registry and acceptance; or ${REDIS_URL_VARIABLE}; without either, memory of this process",
    )
    parser.add_argument("--worker-id", default=f"{kind}-{secrets.token_hex(3)}")
    parser.add_argument("--speculative-config", default="{}", metavar="JSON", type=json_option(SpeculativeConfig))
    parser.add_argument("--engine-config", default="{}", metavar="JSON", type=json_option(EngineConfig))
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")
    parser.add_argument("--quantization", choices=get_args(Quantization), help="pack weights at load, for CPUs")
    parser.add_argument("--verify", action="store_true", help="compare native code with transformers first")
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="how much to log")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics there; 0: any")
    add_tracing_options(parser)
    add_tls_options(parser)
    return parser


@contextmanager
def metrics_endpoint(metrics: CollectorRegistry, options: argparse.Namespace, server: GrpcServer) -> Iterator[None]:
    """Serve metrics and the health of `server` over HTTP while the context lasts, if there is a --metrics-port."""
    if options.metrics_port is None:
        yield
        return
    try:
        with serve_metrics(metrics, options.host, options.metrics_port, lambda: server.serving) as port:
            log.info("metrics on http://%s:%d/metrics", options.host, port)
            yield
    except OSError as error:
        raise StartError(f"--metrics-port {options.metrics_port}: {error.strerror}; choose another one") from error


def run_service(serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a service and return its exit code.

    SIGTERM and SIGINT set the event, after which `serve` drains and returns.
    """
    try:
        asyncio.run(_serve_until_signal(serve))
    except (StartError, StateError, PortInUseError, ModelNotFoundError) as error:
        log.critical("%s", error)
        return COULD_NOT_START
    except Exception:
        log.critical("the service failed", exc_info=True)
        return FAILED
    return 0


async def _serve_until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(stop)


def json_option(settings: type[Settings]) -> Callable[[str], Settings]:
    """A parser for an option whose value is a JSON object with these settings."""

    def parse(text: str) -> Settings:
        try:
            return settings.model_validate_json(text)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(first_error(error)) from None

    return parse
