"""What a gateway's span of an API request says of it.

Attributes are those of OpenTelemetry's conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai), and beside them those that vLLM has for its own span.
Prompts, outputs and stop strings are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

from paceline.messages import Timings
from paceline.output_processor import TextDelta
from paceline.telemetry.tracing import Attributes, AttributeValue, TraceSpan, Tracing, latency_attributes
from paceline_services.gateway.api_errors import ApiError
from paceline_services.gateway.generation.completion_request import CompletionRequest, choices_of
from paceline_services.gateway.generation.deltas import Deltas
from paceline_services.gateway.generation.usage import RequestUsage

PROVIDER = "paceline"
MAX_INT = 2**63 - 1
"""OpenTelemetry's integers are signed."""


def start_request_span(tracing: Tracing, headers: Mapping[str, str], *, chat: bool) -> TraceSpan:
    """Start the span of one API request. `headers`: of HTTP, or gRPC's metadata."""
    operation = "chat" if chat else "text_completion"
    return tracing.start_request(
        headers, {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER} if tracing else {}
    )


def traced(
    span: TraceSpan, model: str, requests: Sequence[CompletionRequest], deltas: Deltas, *, streamed: bool
) -> Deltas:
    """The deltas of an API request's completions, which the span describes while they come."""
    if not span:
        return deltas
    span.set(request_attributes(model, requests) | {"gen_ai.request.stream": streamed})
    return _described(span, model, requests, deltas)


async def _described(span: TraceSpan, model: str, requests: Sequence[CompletionRequest], deltas: Deltas) -> Deltas:
    outcome = RequestOutcome(model, requests, span)
    try:
        with recording_failure(span):
            async with aclosing(deltas):
                async for index, delta in deltas:
                    outcome.add(index, delta)
                    yield index, delta
    finally:
        span.set(outcome.attributes())


@contextmanager
def recording_failure(span: TraceSpan) -> Iterator[None]:
    """Mark the span as failed if the request fails and not by its client's fault."""
    try:
        yield
    except ApiError as error:
        if error.status >= 500:
            span.fail(type(error).__name__, error.message)
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise


def request_attributes(model: str, requests: Sequence[CompletionRequest]) -> dict[str, AttributeValue]:
    """What an API request asks for. `requests`: its completions."""
    first, choices = requests[0], choices_of(requests)
    sampling = first.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": model,
        "gen_ai.request.id": first.group,
        "gen_ai.request.n": choices,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if choices != 1:
        attributes["gen_ai.request.choice.count"] = choices
    if sampling.seed <= MAX_INT:
        attributes["gen_ai.request.seed"] = sampling.seed
    if first.session:
        attributes["gen_ai.conversation.id"] = first.session
    return attributes


class RequestOutcome:
    """Collects what an API request brought, from the deltas of its completions."""

    def __init__(self, model: str, requests: Sequence[CompletionRequest], span: TraceSpan) -> None:
        self._model = model
        self._sequences = len(requests)
        self._usage = RequestUsage(requests, choices_of(requests))
        self._span = span
        self._first_token_s: float | None = None
        self._finish_reasons: dict[int, str] = {}

    def add(self, index: int, delta: TextDelta) -> None:
        """Take note of a delta of the index-th completion."""
        if self._first_token_s is None and delta.tokens:
            self._first_token_s = self._span.elapsed_s
        self._usage.add(index, delta)
        if delta.finish_reason is not None:
            self._finish_reasons[index] = delta.finish_reason.value

    def attributes(self) -> Attributes:
        """As far as the request has come. Phases are those of the completion that took longest."""
        usage, timings = self._usage.usage(), Timings(**self._usage.timings())
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self._finish_reasons.items())],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
            "gen_ai.usage.completion_tokens": usage["completion_tokens"],
            "gen_ai.usage.num_sequences": self._sequences,
            "gen_ai.latency.e2e": self._span.elapsed_s,
            **latency_attributes(timings),
        }
        if self._first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = self._first_token_s
        return attributes
