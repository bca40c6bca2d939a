"""Traces of requests: one tree of spans per API request, over gateway, target and draft. docs/traces.md describes it.

Between services a span is named by W3C's `traceparent` (https://www.w3.org/TR/trace-context), a text. "" means that the
request is not traced; then no service makes a span for it.

The classes here do nothing: they are what a service without traces uses. `paceline.telemetry.otel_tracing` has the
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Literal, Self, TypeAlias

from paceline.messages import Timings

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, AttributeValue]
NO_ATTRIBUTES: Attributes = MappingProxyType({})
SpanRole: TypeAlias = Literal["internal", "server", "client"]
"""OpenTelemetry's span kind: work in this process, a request that it serves, or one that another process serves."""

REQUEST_SPAN = "llm_request"
"""The root of a request's spans, as vLLM calls it. OpenTelemetry's conventions name only spans of clients."""


class TraceSpan:
    """A span. This class is that of a request that is not traced: it does nothing, and is false.

    As a context manager it ends with the context; an exception is recorded, cancellation is not.
    """

    trace_parent = ""
    """For the spans below it, here and in other services."""

    def __bool__(self) -> bool:
        return False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the span began."""
        return 0.0

    def child(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        role: SpanRole = "internal",
        at_ns: int | None = None,
    ) -> TraceSpan:
        """Start a span below this one, now or at a time in nanoseconds since 1970."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes, or change them."""

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed. `kind`: a class of errors, of which there are few."""

    def end(self, at_ns: int | None = None) -> None:
        """End it now, or at a time in nanoseconds since 1970. A span ends once; later calls change nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.fail(type(error).__name__, str(error))
        self.end()


NO_SPAN = TraceSpan()


class Tracing:
    """Starts spans. This class starts none, and is false."""

    def __bool__(self) -> bool:
        return False

    def start_request(self, headers: Mapping[str, str], attributes: Attributes = NO_ATTRIBUTES) -> TraceSpan:
        """Start the span of an API request.

        `headers`: of HTTP, or gRPC's metadata. If they have a `traceparent`, the span is its child, and traced if its
        parent is. Else the sampler of this process decides.
        """
        return NO_SPAN

    def start(
        self, name: str, trace_parent: str, attributes: Attributes = NO_ATTRIBUTES, *, role: SpanRole = "internal"
    ) -> TraceSpan:
        """Start a span below another one, given by its `trace_parent`; see `TraceSpan.child`."""
        return NO_SPAN


NO_TRACING = Tracing()


def latency_attributes(timings: Timings) -> Attributes:
    """The phases of a request at its target, by vLLM's names, in seconds."""
    return {
        "gen_ai.latency.time_in_queue": timings.queue_s,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
        "gen_ai.latency.time_in_model_decode": timings.decode_s,
        "gen_ai.latency.time_in_model_inference": timings.inference_s,
    }
