"""One served model, for HTTP and gRPC alike: whether a request can be served, and its output."""

from __future__ import annotations

import asyncio
import time
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
from paceline_services.gateway.generation.deltas import Deltas, interleaved
from paceline_services.gateway.generation.failover import FailoverRequest
from paceline_services.gateway.generation.running import RunningRequest, RunningRequests
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
        self, completion: RunningCompletion, client: ApiClient, running: RunningRequest, numerics: str | None = None
    ) -> AsyncGenerator[TextDelta]:
        """The deltas of one completion after those before, with their text; the last one has a finish reason.

        `numerics`: of the target that drew its last token. Closing the generator cancels the request at its target.
        Raises an `ApiError` if the request cannot be served.
        """
        request, before = completion.request, completion.before
        with self.metrics.track(self.model) as metrics:
            limits = self.capacity.limits
            run = FailoverRequest(self.fleet, request, limits.resume_s, metrics, self.tracing, before, numerics)
            running.runs.append(run)
            async with aclosing(run.deltas()) as deltas:
                async for raw in deltas:
                    delta = completion.processor.process(raw)
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
    ) -> Deltas:
        """The deltas of several completions as they come, each with its request's index. The first error ends all.

        `before`: deltas that another gateway had of them. They come first, with their text. `numerics`: of the target
        that drew the last token of each, when all have come. If `running` aborts the request, each completion ends with
        the finish reason CANCELLED and without statistics. Raises an `ApiError` if one of the requests cannot be
        served, or if they exceed a limit.
        """
        completions = [RunningCompletion(each, OutputProcessor(each, each.output, self.tokenizer)) for each in requests]
        with self.running.track(client.name, requests[0].group, requests[0].client_request_id) as running:
            if before is not None:
                async for index, delta in before:
                    yield index, completions[index].repeat(delta)
            left = {index: each for index, each in enumerate(completions) if not each.ended}
            if not left:
                return
            with self.counting_rejections():
                self.description()
                self.queue.acquire(len(left))
            try:
                if not any(each.before for each in completions):  # the prompts were counted before the first delta
                    client.count_tokens(sum(len(each.prompt) for each in requests if each.choice == 0), "prompt")
                outputs = {
                    index: self.generate(each, client, running, numerics.get(index)) for index, each in left.items()
                }
                async with aclosing(interleaved(outputs)) as deltas:
                    while (item := await running.next(deltas)) is not None:
                        yield item
                        if left[item[0]].count(item[1]):
                            del left[item[0]]
                            self.queue.release(1)
                            self._observe_choices(completions, item[0])
                for index, each in left.items():
                    yield index, each.aborted()
            finally:
                self.queue.release(len(left))

    def _observe_choices(self, completions: Sequence[RunningCompletion], index: int) -> None:
        """Observe the sizes of all choices of a prompt once the last of them, the index-th completion, has ended."""
        choices = choices_of([each.request for each in completions])
        of_prompt = completions[index - index % choices :][:choices]
        if all(each.ended for each in of_prompt):
            self.metrics.observe_choices(self.model, [each.tokens for each in of_prompt])

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
    if delta.finish_reason is FinishReason.CANCELLED:  # made by `RunningCompletion.aborted`
        return TextDelta.of(delta)
    return processor.process(delta)


@dataclass(slots=True)
class RunningCompletion:
    """One completion so far."""

    request: CompletionRequest
    processor: OutputProcessor
    before: list[Delta] = field(default_factory=list)
    """Deltas that another gateway had."""
    tokens: int = 0
    """Of the output."""
    ended: bool = False

    def repeat(self, delta: Delta) -> TextDelta:
        """A delta that another gateway had, with its text."""
        # A copy: whoever takes the delta may append later ones to it.
        self.before.append(replace(delta, tokens=[*delta.tokens], prompt_log_probs=[*delta.prompt_log_probs]))
        self.count(delta)
        return with_text(self.processor, delta)

    def count(self, delta: Delta) -> bool:
        """Take note of the next delta. Returns whether it is the last one."""
        self.tokens += len(delta.tokens)
        self.ended = delta.finish_reason is not None
        return self.ended

    def aborted(self) -> TextDelta:
        """The last delta if its client ends it now."""
        usage = Usage(len(self.request.prompt), self.tokens)
        return TextDelta(self.request.request_id, finish_reason=FinishReason.CANCELLED, usage=usage)
