"""Whether a service makes traces, and where they go."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from paceline.launcher import StartError
from paceline.telemetry.tracing import NO_TRACING, Tracing

EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
"""OpenTelemetry's own: otlp, console or both, with a comma between. Unset it means otlp to an SDK, and none here."""
EXPORTERS = frozenset({"otlp", "console"})
OTLP_PATH = "/v1/traces"


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
