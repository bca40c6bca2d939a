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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ValidationError

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline.config.engine_config import ENGINE_OPTIONS
from paceline.config.validation_messages import first_error
from paceline.ipc.model_process import ModelProcess, model_process
from paceline.launcher import COULD_NOT_START, FAILED, StartError
from paceline.model_names import ModelNotFoundError
from paceline.telemetry import logs
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.tls import CertificateError, Certificates

log = logging.getLogger(__name__)

REDIS_URL_VARIABLE = "PACELINE_REDIS_URL"
"""Environment variable for a URL with a password: every user of the machine can read command lines."""

EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
"""OpenTelemetry's own: otlp, console or both, with a comma between. Unset it means otlp to an SDK, and none here."""
EXPORTERS = frozenset({"otlp", "console"})
OTLP_PATH = "/v1/traces"

Settings = TypeVar("Settings", bound=BaseModel)
Options = TypeVar("Options")


def start_model_process(
    module: str, options: argparse.Namespace, python: str = sys.executable
) -> AbstractAsyncContextManager[ModelProcess]:
    """A worker's model process, which `python` runs, with the worker's options."""
    # A path of Python 3.13 cannot be unpickled by an older Python.
    texts = {name: str(each) if isinstance(each, Path) else each for name, each in vars(options).items()}
    return model_process(module, argparse.Namespace(**texts), python)


def option(default: Any, help: str, **form: Any) -> Any:
    """A field of a dataclass that is also an option of the command line, by its name.

    `default`: a value, or what makes one; a number says the type. `form`: arguments of `ArgumentParser.add_argument`.
    """
    value = {"default_factory": default} if callable(default) else {"default": default}
    kind = {"type": type(default)} if isinstance(default, int | float) else {}
    return field(**value, metadata={"help": help} | kind | form)


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Add every `option` of a dataclass."""
    for each in fields(settings):
        if each.metadata:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            parser.add_argument(f"--{each.name.replace('_', '-')}", default=default, **each.metadata)


def options_of(settings: type[Options], options: argparse.Namespace, **others: object) -> Options:
    """An instance of a dataclass from the parsed options that have its fields' names, and from `others`."""
    given = {each.name: getattr(options, each.name) for each in fields(settings) if hasattr(options, each.name)}  # type: ignore[arg-type]
    return settings(**given | others)


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


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add --tls-cert, --tls-key and --tls-ca."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this service's certificate for other services")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority that signed all services' certificates")


def service_certificates(options: argparse.Namespace) -> Certificates | None:
    """Return the certificates of `add_tls_options`; None: no TLS between services. Raises `StartError`."""
    return load_certificates({name: getattr(options, name) for name in ("tls_cert", "tls_key", "tls_ca")})


def load_certificates(files: Mapping[str, Path | None]) -> Certificates | None:
    """Return the certificates of these files, by option name, or None if no file is given.

    `files` has certificate, key and optionally authority, in this order. Raises `StartError` if a file is missing.
    """
    given = [path for path in files.values() if path is not None]
    if not given:
        return None
    if missing := [f"--{name.replace('_', '-')}" for name, path in files.items() if path is None]:
        raise StartError(f"{' and '.join(missing)} must be given, too: TLS needs all of its files")
    try:
        return Certificates(*given)
    except CertificateError as error:
        raise StartError(f"TLS cannot be set up: {error}") from error


def add_tracing_options(parser: argparse.ArgumentParser) -> None:
    """Add --otlp-traces-endpoint."""
    parser.add_argument(
        "--otlp-traces-endpoint",
        type=collector_url,
        metavar="URL",
        help=f"send traces to this OpenTelemetry collector, by OTLP over HTTP; or ${EXPORTER_VARIABLE}; else no traces",
    )


def collector_url(text: str) -> str:
    """Parse the URL of a collector. Without a path it gets OTLP's, /v1/traces."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"must be an http or https URL, not {text}")
    return text if parts.path.strip("/") else urlunsplit(parts._replace(path=OTLP_PATH))


@contextmanager
def open_tracing(service: str, worker_id: str, endpoint: str | None) -> Iterator[Tracing]:
    """Make traces while the context lasts, if the option or the environment asks for them. Raises `StartError`."""
    exporters = requested_exporters(endpoint)
    if not exporters:
        yield NO_TRACING
        return
    try:
        from paceline.telemetry.otel_tracing import OtelTracing, make_provider

        tracing = OtelTracing(make_provider(service, worker_id, exporters, endpoint))
    except ImportError as error:
        raise StartError(f"traces need OpenTelemetry's SDK ({error}): pip install 'paceline[otel]'") from error
    try:
        yield tracing
    finally:
        tracing.close()


def requested_exporters(endpoint: str | None) -> set[str]:
    """Names of exporters; none: no traces. Raises `StartError`."""
    named = {each.strip() for each in os.environ.get(EXPORTER_VARIABLE, "").split(",")} - {"", "none"}
    if unknown := named - EXPORTERS:
        raise StartError(f"{EXPORTER_VARIABLE}: {', '.join(sorted(unknown))} is not known; give otlp, console or none")
    return named | ({"otlp"} if endpoint else set())
