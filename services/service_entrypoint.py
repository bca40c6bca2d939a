"""From a command line to an exit code, for all services.

Exit codes: 0: stopped as asked · 1: failed while serving, with a traceback in the log · 2: could not start, with one
line in the log that says what to do.

Little is imported here: a worker's model process starts as soon as the options are known, and the rest is imported
beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline.config.engine_config import ENGINE_OPTIONS
from paceline.config.validation_messages import first_error
from paceline.ipc.model_process import ModelProcess, model_process
from paceline.launcher import COULD_NOT_START, FAILED, StartError
from paceline.model_names import ModelNotFoundError
from paceline.telemetry import logs
from paceline_services.tls_options import add_tls_options
from paceline_services.tracing_options import add_tracing_options

log = logging.getLogger(__name__)

REDIS_URL_VARIABLE = "PACELINE_REDIS_URL"
"""Environment variable for a URL with a password: every user of the machine can read command lines."""

Settings = TypeVar("Settings", bound=BaseModel)


def start_model_process(
    module: str, options: argparse.Namespace, python: str = sys.executable
) -> AbstractAsyncContextManager[ModelProcess]:
    """A worker's model process, which `python` runs, with the worker's options."""
    # A path of Python 3.13 cannot be unpickled by an older Python.
    texts = {name: str(each) if isinstance(each, Path) else each for name, each in vars(options).items()}
    return model_process(module, argparse.Namespace(**texts), python)


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
    for name in ENGINE_OPTIONS:
        field = EngineConfig.model_fields[name]
        values = get_args(next(iter(get_args(field.annotation)), None))  # of a Literal, which may also be None
        form: dict[str, Any] = {"choices": values} if values else {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=field.description, **form)
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="how much to log")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics there; 0: any")
    add_tracing_options(parser)
    add_tls_options(parser)
    return parser


def run_service(serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a service and return its exit code.

    SIGTERM and SIGINT set the event, after which `serve` drains and returns.
    """
    try:
        asyncio.run(_serve_until_signal(serve))
    except (StartError, ModelNotFoundError) as error:
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
