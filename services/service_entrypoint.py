"""From a command line to an exit code, the same for the services that speak gRPC.

0: stopped as asked · 1: failed while serving, with a traceback in the log · 2: could not start, with one line that
says what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline.config.validation_messages import first_error
from paceline.ipc.model_process import ModelProcess, ModelProcessStartError
from paceline.model_names import ModelNotFoundError
from paceline.state import StateError
from paceline.telemetry import logs
from paceline.telemetry.metrics_exporter import serve_metrics
from paceline.wire.grpc_server import GrpcServer, PortInUseError

log = logging.getLogger(__name__)

REDIS_URL_VARIABLE = "PACELINE_REDIS_URL"
"""Environment variable: a command line shows its passwords to everybody on the machine."""
COULD_NOT_START = 2
FAILED = 1

Settings = TypeVar("Settings", bound=BaseModel)


def positive_int(text: str) -> int:
    """An option that counts something there has to be."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


class ServiceStartError(Exception):
    """The service cannot start; the text says what to do."""


class ServiceStoppedError(Exception):
    """The service was asked to stop before it had begun."""


def parse_with_config_file(known: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """With the options of a `--config` file before those of the command line, which count more. Exits if either makes
    no sense."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (first, known):
        each.add_argument("--config", type=Path, metavar="FILE", help="options by name, YAML or TOML")
    file = first.parse_known_args(arguments)[0].config
    if file is None:
        return known.parse_args(arguments)
    names = {option.removeprefix("--").replace("-", "_") for option in known._option_string_actions}
    try:
        return known.parse_args([*as_arguments(read(file, names - {"config", "help"})), *arguments])
    except ConfigFileError as error:
        known.error(str(error))


def service_parser(kind: str, description: str) -> argparse.ArgumentParser:
    """What every service can be told."""
    arguments = argparse.ArgumentParser(prog=f"paceline {kind}", description=description, allow_abbrev=False)
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on")
    arguments.add_argument("--port", type=int, default=0, help="0: the system chooses")
    arguments.add_argument("--advertise", metavar="HOST:PORT", help="where others reach it; else where it listens")
    arguments.add_argument(
        "--redis-url",
        default=os.environ.get(REDIS_URL_VARIABLE),
        help=f"registry and acceptance; or ${REDIS_URL_VARIABLE}; without either, memory of this process",
    )
    arguments.add_argument("--worker-id", default=f"{kind}-{secrets.token_hex(3)}")
    arguments.add_argument("--speculative-config", default="{}", metavar="JSON", type=_json_option(SpeculativeConfig))
    arguments.add_argument("--engine-config", default="{}", metavar="JSON", type=_json_option(EngineConfig))
    arguments.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")
    arguments.add_argument("--log-level", choices=logs.LEVELS, default="info", help="how much to log")
    arguments.add_argument("--metrics-port", type=int, help="serve Prometheus metrics there; 0: any")
    return arguments


@contextmanager
def metrics_endpoint(metrics: CollectorRegistry, options: argparse.Namespace, server: GrpcServer) -> Iterator[None]:
    """Serve metrics, and whether `server` takes calls, for as long as the context lasts, if the command line asks."""
    if options.metrics_port is None:
        yield
        return
    try:
        with serve_metrics(metrics, options.host, options.metrics_port, lambda: server.serving) as port:
            log.info("metrics on http://%s:%d/metrics", options.host, port)
            yield
    except OSError as error:
        raise ServiceStartError(
            f"--metrics-port {options.metrics_port}: {error.strerror}; choose another one"
        ) from error


def run_service(serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a service until it is asked to stop, and return its exit code.

    `serve` starts, waits for the event that SIGTERM and SIGINT set, and ends in order.
    """
    try:
        asyncio.run(_until_signal(serve))
    except ServiceStoppedError:
        return 0
    except (ServiceStartError, StateError, PortInUseError, ModelNotFoundError, ModelProcessStartError) as error:
        log.critical("%s", error)
        return COULD_NOT_START
    except Exception:
        log.critical("the service failed", exc_info=True)
        return FAILED
    return 0


async def _until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(stop)


async def wait_until_ready(compute: ModelProcess, stop: asyncio.Event) -> object:
    """What the service's compute says of itself, once it is ready. Raises `ServiceStoppedError`, and what `ready`
    raises."""
    ready, stopped = asyncio.ensure_future(compute.ready()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise ServiceStoppedError
        return ready.result()
    finally:
        ready.cancel()
        stopped.cancel()


async def wait_until_stopped(stop: asyncio.Event, work: asyncio.Future[None]) -> None:
    """Return when the service is asked to stop or its compute has ended, which it does only by failing."""
    work.add_done_callback(lambda _: stop.set())
    await stop.wait()


def _json_option(settings: type[Settings]) -> Callable[[str], Settings]:
    def parse(text: str) -> Settings:
        try:
            return settings.model_validate_json(text)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(first_error(error)) from None

    return parse
