"""One served model, for HTTP and gRPC alike: whether a request can be served, and its output."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from paceline.messages import Delta, FinishReason, TargetDescription, Usage
from paceline.output_processor import OutputProcessor, TextDelta
from paceline.parsing.output_format import OutputFormat
from paceline.telemetry.gateway_metrics import GatewayMetrics, ModelTotals
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import RetryLaterError, UnavailableError
from paceline_services.gateway.auth import ANONYMOUS, ApiClient
from paceline_services.gateway.generation.admission import AdmissionQueue, Capacity
from paceline_services.gateway.generation.completion_request import CompletionRequest, choices_of
from paceline_services.gateway.generation.deltas import interleaved
from paceline_services.gateway.generation.failover import FailoverRequest
from paceline_services.gateway.generation.running import RunningRequests
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.gateway.structured.output import GrammarChecks

FINAL_STATS_TIMEOUT_S = 2.0
"""How long to wait for the statistics of a request that a stop string ended."""


@dataclass(slots=True)
class ServedModel:
    """One model and the fleet that serves it. All models of a gateway share `capacity`, `metrics`, `grammars` and
    `tracing`."""

    model: str
    tokenizer: Tokenizer
    fleet: Fleet
    metrics: GatewayMetrics
    capacity: Capacity = field(default_factory=Capacity)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    output_format: OutputFormat = field(default_factory=OutputFormat)
    """How the model writes reasoning and tool calls."""
    tracing: Tracing = NO_TRACING
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of requests that leave these fields of `SamplingParams` out."""
    own_length: int | None = None
    """Positions of the model by its configuration; targets may serve fewer."""
    created: int = field(default_factory=lambda: int(time.time()))
    running: RunningRequests = field(default_factory=RunningRequests)
    queue: AdmissionQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.capacity, self.fleet)
        self.metrics.set_sources(
            self.model, lambda: self.queue.waiting, lambda: self.fleet.targets_up, self.fleet.breaker_states
        )

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; the model's own, or None if it does not say, while no target is up."""
        description = self.fleet.description()
        return self.own_length if description is None else description.max_model_len

    @property
    def totals(self) -> ModelTotals:
        return self.metrics.totals(self.model)

    @property
    def vocabulary_size(self) -> int:
        """The model's; the tokenizer's, which may be smaller, while no target is up."""
        description = self.fleet.description()
        return max(len(self.tokenizer.pieces), 0 if description is None else description.vocabulary_size)

    def unavailable(self, labels: frozenset[str] = frozenset()) -> UnavailableError | None:
        """Why no request for a target with these labels can be served now; None if one can."""
        if self.capacity.closing:
            return UnavailableError("the gateway is closing", reason="closing")
        if not self.fleet.targets_up:
            return UnavailableError("no target is up; try again soon")
        if not self.fleet.has_target():
            return UnavailableError("every target fails; try again soon", self.fleet.retry_after_s(), reason="breaker")
        if not self.fleet.has_target(labels):
            named = ", ".join(sorted(labels))
            return UnavailableError(f"no target labelled {named} is available; try again soon", reason="labels")
        return None

    def description(self, labels: frozenset[str] = frozenset()) -> TargetDescription:
        """The model as all targets with these labels serve it.

        Raises `UnavailableError` while no request for a target with these labels can be served.
        """
        if error := self.unavailable(labels):
            raise error
        description = self.fleet.description(labels)
        assert description is not None
        return description

    async def generate(
        self,
        request: CompletionRequest,
        processor: OutputProcessor,
        client: ApiClient,
        before: Sequence[Delta] = (),
        numerics: str | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """The deltas of one completion after those before, with their text; the last one has a finish reason.

        `processor` has processed the deltas before; `numerics`: of the target that drew their last token. Closing the
        generator cancels the request at its target. Raises an `ApiError` if the request cannot be served.
        """
        with self.metrics.track(self.model) as metrics:
            limits = self.capacity.limits
            run = FailoverRequest(self.fleet, request, limits.resume_s, metrics, self.tracing, before, numerics)
            async with aclosing(run.deltas()) as deltas:
                async for raw in deltas:
                    delta = processor.process(raw)
                    delta.numerics = run.numerics
                    metrics.tokens(len(delta.tokens))
                    client.count_tokens(len(delta.tokens), "output")
                    if delta.finish_reason is not None:
                        if raw.finish_reason is None:
                            run.finish_early()
                            if request.speculative.report:
                                await _add_final_stats(delta, deltas)
                        assert delta.usage is not None
                        metrics.finished(delta.finish_reason, delta.usage, request.sampling.max_tokens)
                    yield delta
                    if delta.finish_reason is not None:
                        return

    async def generate_all(
        self,
        requests: Sequence[CompletionRequest],
        client: ApiClient = ANONYMOUS,
        before: AsyncGenerator[tuple[int, Delta]] | None = None,
        numerics: Mapping[int, str] = MappingProxyType({}),
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        """The deltas of several completions as they come, each with its request's index. The first error ends all.

        `before`: deltas that another gateway had of them. They come first, with their text. `numerics`: of the target
        that drew the last token of each, when all have come.

        If `running` aborts the request, each completion ends with the finish reason CANCELLED and without statistics.
        Raises an `ApiError` if one of the requests cannot be served, or if they exceed a limit.
        """
        processors = [OutputProcessor(each, each.output, self.tokenizer) for each in requests]
        choices = choices_of(requests)
        tokens = dict.fromkeys(range(len(requests)), 0)
        """Output tokens of each completion that has not ended."""
        earlier: defaultdict[int, list[Delta]] = defaultdict(list)
        with self.running.track(client.name, requests[0].group, requests[0].client_request_id) as running:
            if before is not None:
                async for index, delta in before:
                    # A copy: whoever takes the delta may append later ones to it.
                    copy = replace(delta, tokens=[*delta.tokens], prompt_log_probs=[*delta.prompt_log_probs])
                    earlier[index].append(copy)
                    tokens[index] += len(delta.tokens)
                    if delta.finish_reason is not None:
                        del tokens[index]
                    yield index, with_text(processors[index], delta)
            if not tokens:
                return
            with self.counting_rejections():
                self.description()
                self.queue.acquire(len(tokens))
            if not earlier:  # the prompts were counted before the first delta
                client.count_tokens(sum(len(each.prompt) for each in requests if each.choice == 0), "prompt")
            sizes: defaultdict[int, list[int]] = defaultdict(list)  # by prompt
            try:
                outputs = {
                    index: self.generate(
                        requests[index], processors[index], client, earlier[index], numerics.get(index)
                    )
                    for index in tokens
                }
                async with aclosing(interleaved(outputs)) as deltas:
                    while (item := await running.next(deltas)) is not None:
                        index, delta = item
                        tokens[index] += len(delta.tokens)
                        yield index, delta
                        if delta.finish_reason is not None:
                            del tokens[index]
                            self.queue.release(1)
                            finished = sizes[index // choices]
                            finished.append(delta.usage.completion_tokens if delta.usage else 0)
                            if len(finished) == choices:
                                self.metrics.observe_choices(self.model, finished)
                for index, count in tokens.items():
                    yield index, _aborted(requests[index], count)
            finally:
                self.queue.release(len(tokens))

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count in the metrics every request refused for want of capacity or of a target."""
        try:
            yield
        except RetryLaterError as error:
            self.metrics.rejected(self.model, error.reason)
            raise


async def _add_final_stats(last: TextDelta, deltas: AsyncGenerator[Delta]) -> None:
    """Complete the delta that a stop string ended with the statistics that the target sends on being cancelled."""
    with suppress(TimeoutError):  # the response goes without statistics
        async with asyncio.timeout(FINAL_STATS_TIMEOUT_S):
            async for delta in deltas:
                last.speculation, last.timings = delta.speculation, delta.timings
                cached = delta.usage.cached_tokens if delta.usage else 0
                last.usage = replace(last.usage or Usage(0, 0), cached_tokens=cached)


def with_text(processor: OutputProcessor, delta: Delta) -> TextDelta:
    """The text of a delta that was made by this module, at this gateway or another one, and lost its text."""
    if delta.finish_reason is FinishReason.CANCELLED:  # made by `_aborted`
        return TextDelta.of(delta)
    return processor.process(delta)


def _aborted(request: CompletionRequest, tokens: int) -> TextDelta:
    """The last delta of a completion that its client ends after so many tokens."""
    usage = Usage(len(request.prompt), tokens)
    return TextDelta(request.request_id, finish_reason=FinishReason.CANCELLED, usage=usage)
