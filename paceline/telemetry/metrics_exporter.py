"""An HTTP server for /metrics and /health of services that otherwise speak only gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, start_http_server


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str, port: int, healthy: Callable[[], bool]) -> Iterator[int]:
    """Serve `http://host:port/metrics` from a thread while the context lasts; yields the port.

    `/health` returns 200, or 503 if not `healthy`, for probes without a certificate for gRPC. Port 0: the system
    chooses. Raises `OSError` if the port is taken.
    """
    server, thread = start_http_server(port, host, registry)
    server.set_app(_with_health(server.get_app(), healthy))
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _with_health(metrics: WSGIApplication | None, healthy: Callable[[], bool]) -> WSGIApplication:
    assert metrics is not None  # `start_http_server` sets it

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/health":
            return metrics(environ, start_response)
        start_response("200 OK" if healthy() else "503 Service Unavailable", [("Content-Length", "0")])
        return []

    return respond
