"""A small HTTP server for /metrics, for services that speak only gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve `http://host:port/metrics` from a thread for as long as the context lasts; gives the port.

    Port 0: the system chooses. Raises `OSError` if the port is taken.
    """
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
