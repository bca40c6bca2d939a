"""Creates Prometheus metrics and serves them. Some have vLLM's names, too, so that dashboards made for vLLM work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline import __version__

T = TypeVar("T", Counter, Gauge, Histogram)


class MetricFactory(Collector):
    """Creates metrics in a registry. Names are given without the prefix `paceline_`.

    `constant`: labels that all metrics share, with their values. A metric without further labels is returned bound to
    them; for any other, the caller gives all values to `labels`, the constant ones first.
    `vllm=True` exports a metric a second time, with the prefix `vllm:`.
    """

    def __init__(self, registry: CollectorRegistry, service: str, **constant: str) -> None:
        self._registry = registry
        self._constant = constant
        self._also_vllm: list[tuple[Collector, str]] = []
        build = Info("paceline_build", "What is running", registry=registry)
        build.info({"version": __version__, "service": service})
        registry.register(self)

    def counter(self, name: str, help_: str, labels: Sequence[str] = (), *, vllm: bool = False) -> Counter:
        names = [*self._constant, *labels]
        return self._bound(Counter(f"paceline_{name}", help_, names, registry=self._registry), name, labels, vllm)

    def gauge(self, name: str, help_: str, labels: Sequence[str] = (), *, vllm: bool = False) -> Gauge:
        names = [*self._constant, *labels]
        return self._bound(Gauge(f"paceline_{name}", help_, names, registry=self._registry), name, labels, vllm)

    def histogram(
        self, name: str, help_: str, buckets: Sequence[float], labels: Sequence[str] = (), *, vllm: bool = False
    ) -> Histogram:
        names = [*self._constant, *labels]
        histogram = Histogram(f"paceline_{name}", help_, names, registry=self._registry, buckets=buckets)
        return self._bound(histogram, name, labels, vllm)

    def collect(self) -> Iterator[Metric]:
        for collector, name in self._also_vllm:
            for metric in collector.collect():
                yield _renamed(metric, f"paceline_{name}", f"vllm:{name}")

    def _bound(self, metric: T, name: str, labels: Sequence[str], vllm: bool) -> T:
        if vllm:
            self._also_vllm.append((metric, name))
        return metric.labels(*self._constant.values()) if self._constant and not labels else metric


def _renamed(metric: Metric, old: str, new: str) -> Metric:
    renamed = Metric(new, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(name=new + sample.name.removeprefix(old))
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return renamed


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
