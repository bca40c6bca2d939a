"""Traces by OpenTelemetry's SDK. Only this module imports it, and only a service that makes traces imports this one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline import __version__
from paceline.telemetry.tracing import NO_ATTRIBUTES, NO_SPAN, REQUEST_SPAN, Attributes, SpanRole, TraceSpan, Tracing

FLUSH_S = 3.0
"""How long a service that stops waits for its last spans to be sent."""
KINDS: Mapping[SpanRole, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
}


class OtelTracing(Tracing):
    """Starts spans that a provider samples and exports."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("paceline", __version__)
        self._w3c = TraceContextTextMapPropagator()

    def __bool__(self) -> bool:
        return True

    def start_request(self, headers: Mapping[str, str], attributes: Attributes = NO_ATTRIBUTES) -> TraceSpan:
        return _started(self._tracer, REQUEST_SPAN, self._w3c.extract(headers), attributes, "server")

    def start(
        self, name: str, trace_parent: str, attributes: Attributes = NO_ATTRIBUTES, *, role: SpanRole = "internal"
    ) -> TraceSpan:
        if not trace_parent:
            return NO_SPAN
        parent = self._w3c.extract({"traceparent": trace_parent})
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN  # no traceparent: it would become a root
        return _started(self._tracer, name, parent, attributes, role)

    def close(self) -> None:
        """Send the last spans, for at most `FLUSH_S` seconds: a collector may be away."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


class OtelSpan(TraceSpan):
    """A span that is recorded."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        context = span.get_span_context()
        ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
        self.trace_parent = f"00-{ids}-{context.trace_flags:02x}"
        self._tracer = tracer
        self._span = span
        self._began = time.perf_counter()

    def __bool__(self) -> bool:
        return True

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def child(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        role: SpanRole = "internal",
        at_ns: int | None = None,
    ) -> TraceSpan:
        return _started(self._tracer, name, trace.set_span_in_context(self._span, Context()), attributes, role, at_ns)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():  # a response may end before its generator is closed
            self._span.set_attributes(attributes)

    def fail(self, kind: str, message: str = "") -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR, message)

    def end(self, at_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(at_ns)


def _started(
    tracer: Tracer, name: str, parent: Context, attributes: Attributes, role: SpanRole, at_ns: int | None = None
) -> TraceSpan:
    span = tracer.start_span(name, parent, KINDS[role], attributes, start_time=at_ns)
    return OtelSpan(tracer, span) if span.is_recording() else NO_SPAN


def make_provider(service: str, worker_id: str, exporters: Collection[str], endpoint: str | None) -> TracerProvider:
    """`exporters`: console, otlp or both. `endpoint`: a collector's URL; None: as `OTEL_EXPORTER_OTLP_*` say.

    The SDK's other variables apply, such as `OTEL_TRACES_SAMPLER` and `OTEL_RESOURCE_ATTRIBUTES`. Unless they name a
    sampler, all requests are traced except those whose client's span is not sampled.
    """
    names = {"service.name": f"paceline-{service}", "service.instance.id": worker_id, "service.version": __version__}
    named = Resource(names).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create(named.attributes), shutdown_on_exit=False)
    if "console" in exporters:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr, formatter=_as_line)))
    if "otlp" in exporters:
        provider.add_span_processor(_otlp(endpoint))
    return provider


def _otlp(endpoint: str | None) -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _as_line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}{os.linesep}"
