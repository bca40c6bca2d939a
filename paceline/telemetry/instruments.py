"""Prometheus instruments under our names, and once more under vLLM's, so that existing dashboards work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline import __version__

T = TypeVar("T", bound=Collector)


class MetricFactory(Collector):
    """Makes instruments in a registry, and shows those that vLLM has too a second time, under its names.

    Names are given without a prefix: ours is `paceline_`, theirs `vllm:`. Where an instrument is labelled
    `model_name` it is so under both.
    """

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._registry = registry
        self._also_vllm: list[tuple[Collector, str, str]] = []
        build = Info("paceline_build", "What is running", registry=registry)
        build.info({"version": __version__, "service": service})
        registry.register(self)

    def counter(self, name: str, help_: str, labels: Sequence[str] = (), *, vllm: str = "") -> Counter:
        """`vllm`: its name there, without prefix and `_total`."""
        counter = Counter(f"paceline_{name}", help_, labels, registry=self._registry)
        return self._shared(counter, name, vllm)

    def gauge(self, name: str, help_: str, labels: Sequence[str] = (), *, vllm: str = "") -> Gauge:
        return self._shared(Gauge(f"paceline_{name}", help_, labels, registry=self._registry), name, vllm)

    def histogram(
        self, name: str, help_: str, labels: Sequence[str] = (), *, buckets: Sequence[float], vllm: str = ""
    ) -> Histogram:
        histogram = Histogram(f"paceline_{name}", help_, labels, registry=self._registry, buckets=buckets)
        return self._shared(histogram, name, vllm)

    def collect(self) -> Iterator[Metric]:
        for instrument, name, vllm in self._also_vllm:
            for metric in instrument.collect():
                yield _renamed(metric, f"paceline_{name}", f"vllm:{vllm}")

    def _shared(self, instrument: T, name: str, vllm: str) -> T:
        if vllm:
            self._also_vllm.append((instrument, name, vllm))
        return instrument


def _renamed(metric: Metric, old: str, new: str) -> Metric:
    renamed = Metric(new, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(name=new + sample.name.removeprefix(old))
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return renamed
