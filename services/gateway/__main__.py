"""`python -m paceline_services.gateway`: one gateway."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.model_names import served_name
from paceline.state.record_store import RecordLimits
from paceline.telemetry import logs
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.server import serve
from paceline_services.gateway.settings import GatewaySettings
from paceline_services.service_entrypoint import (
    REDIS_URL_VARIABLE,
    add_options,
    add_tls_options,
    add_tracing_options,
    load_certificates,
    options_of,
    parse_with_config_file,
    positive_int,
    run_service,
    service_certificates,
)

MEGABYTE = 2**20


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("gateway", options.worker_id, options.log_level.upper())
    return run_service(lambda stop: _serve(options, stop))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options. Exits with a message if they are wrong."""
    parser = _parser()
    options = parse_with_config_file(parser, arguments)
    try:
        options.models = _models(options.model, options.served_model_name)
        options.aliases = _aliases(options.alias, options.models)
    except ValueError as error:
        parser.error(str(error))
    return options


async def _serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    await serve(gateway_settings(options), options.redis_url, stop)


def gateway_settings(options: argparse.Namespace) -> GatewaySettings:
    """The settings that parsed options amount to."""
    return options_of(
        GatewaySettings,
        options,
        records=RecordLimits(options.stored_response_s, options.resumable_s, options.stored_mb * MEGABYTE),
        limits=options_of(AdmissionLimits, options),
        edge_tls=load_certificates({"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile}),
        tls=service_certificates(options),
    )


def _models(models: Sequence[str], names: Sequence[str] | None) -> dict[str, str]:
    """Each model by the name under which it is served. Raises ValueError."""
    wanted: Sequence[str | None] = names or [None] * len(models)
    if len(wanted) != len(models):
        raise ValueError("--served-model-name: give it once for every --model, in the same order, or not at all")
    for model, name in zip(models, wanted, strict=True):
        served_name(model, name)
    served = {name or model: model for model, name in zip(models, wanted, strict=True)}
    if len(served) < len(models):
        raise ValueError("--model: two have the same name; tell them apart with --served-model-name")
    return served


def _aliases(given: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """The model of each alias. Raises ValueError."""
    aliases: dict[str, str] = {}
    for each in given:
        alias, _, model = each.partition("=")
        if not alias or model not in names or alias in names or alias in aliases:
            raise ValueError(f"--alias {each}: write NAME=MODEL, a new name for one of {', '.join(names)}")
        aliases[alias] = model
    return aliases


def _parser() -> argparse.ArgumentParser:
    records = RecordLimits()
    parser = argparse.ArgumentParser(
        prog="paceline gateway",
        description="OpenAI's HTTP API and gRPC in front of target workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        action="append",
        help="name or folder of a model, for its tokenizer; as its targets have it; several: give it again",
    )
    add("--served-model-name", action="append", help="what clients and targets call it; else as --model")
    add("--alias", action="append", default=[], metavar="NAME=MODEL", help="clients may call that model so, too")
    redis_url = os.environ.get(REDIS_URL_VARIABLE)
    add(
        "--redis-url",
        default=redis_url,
        required=not redis_url,
        help=f"where workers are registered; or ${REDIS_URL_VARIABLE}",
    )
    add(
        "--stored-response-s",
        type=float,
        default=records.response_s,
        help="keep finished responses so long for previous_response_id; 0: keep none",
    )
    add(
        "--resumable-s",
        type=float,
        default=records.resumable_s,
        help="keep a stream so long after its last token for clients that reconnect; 0: keep none",
    )
    add(
        "--stored-response-mb",
        dest="stored_mb",
        type=positive_int,
        default=records.max_bytes // MEGABYTE,
        help="most megabytes of kept responses and streams, in Redis",
    )
    add("--ssl-certfile", type=Path, metavar="FILE", help="certificate for clients: HTTPS, and TLS for gRPC")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its private key")
    add("--log-level", choices=logs.LEVELS, default="info", help="how much to log")
    add_tls_options(parser)
    add_tracing_options(parser)
    add_options(parser, AdmissionLimits)
    add_options(parser, GatewaySettings)
    return parser


if __name__ == "__main__":
    sys.exit(main())
