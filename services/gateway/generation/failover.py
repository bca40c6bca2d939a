"""One request across targets: submit it, yield its deltas, replay it at another target when a target dies or drains.

What happens when a target dies is told step by step, with the function of each step, in `docs/architecture.md` under
"A target dies in the middle of a response".
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from paceline.messages import (
    GRAMMAR_ERROR,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptLogProbs,
    SpeculationStats,
)
from paceline.telemetry.gateway_metrics import RequestMetrics
from paceline.telemetry.tracing import NO_SPAN, NO_TRACING, Attributes, TraceSpan, Tracing
from paceline.wire.link_errors import NotSubmitted, ReplayElsewhere, TargetEngineDied, TargetLost, WireError
from paceline_services.gateway.api_errors import GenerationError, InvalidRequestError, UnavailableError
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.gateway.routing.target_connection import InFlightRequest, TargetConnection, block_hashes

log = logging.getLogger(__name__)

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
MAX_TARGET_LOSSES = 4
"""Losses of its target in a row, without a token between them, that a request survives."""
MAX_ENGINE_DEATHS = 1
"""The same for deaths of an engine: the request may be what kills engines."""
UNKNOWN = "an unknown worker version"


class TargetRefusedError(Exception):
    """A target ended the request with an error before its first token. A second target shows whose fault that is."""


class FailoverRequest:
    """Yields the deltas of one request. Losing a target is a pause: another target takes over.

    Same seed, same prompt, same committed tokens, same numerics: with a drafter-invariant strategy the other target
    draws exactly the tokens that the lost one would have drawn; with `residual` and lossy strategies, tokens of the
    same distribution. A target with other numerics takes over only if none whose context holds the request has
    the same; a warning is logged.

    When an engine dies, any of its requests may be the cause. Each of them is replayed in the quarantine of its next
    target, one at a time, so that the next death identifies the cause.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: CompletionRequest,
        resume_s: float,
        metrics: RequestMetrics,
        tracing: Tracing = NO_TRACING,
        before: Iterable[Delta] = (),
        numerics: str | None = None,
    ) -> None:
        """`resume_s`: how long to wait while no target can take the request, as after it lost its target.

        `before`: deltas that another gateway had of this request, and the `numerics` of the target that drew their
        last token. It continues after them.
        """
        self._fleet = fleet
        self._request = request
        self._resume_s = resume_s
        self._metrics = metrics
        self._tracing = tracing
        self._committed: list[int] = list(request.committed)
        self._scored_prompt = ScoredPrompt(request)
        self.numerics = numerics
        """Of the target that drew the latest token, as its description has them; None: there is no token."""
        self.targets: list[str] = []
        """Ids of the targets that had the request, in order."""
        self.replays = 0
        self.stats: list[SpeculationStats] = []
        """What each of them said last."""
        self._target: TargetConnection | None = None
        self._in_flight: InFlightRequest | None = None
        self._refused_by: TargetConnection | None = None
        self._losses = 0  # since the latest token
        self._engine_deaths = 0  # those of them that are the engine's
        self._replays = False  # the next target goes on where another one was lost or drained
        self._cancelled = False
        for delta in before:
            self._scored_prompt.take(delta)
            self._committed += delta.tokens
            if delta.speculation is not None:
                self.stats = [delta.speculation]

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return len(self._committed)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The deltas, from one target after another.

        Raises an `ApiError` if the request cannot be served. Closing the generator cancels the request at its target.
        """
        while True:
            try:
                async with aclosing(self._run_on(*await self._next_attempt())) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except WireError as error:
                raise InvalidRequestError(str(error)) from error
            except TargetRefusedError as error:
                if not self._note_refusal():
                    raise GenerationError(str(error)) from error
            except ReplayElsewhere as error:
                if self._cancelled:
                    return
                self._note_loss(error)

    def finish_early(self) -> None:
        """End the request, successfully, at a stop string. Its last delta still follows, with its statistics."""
        self._cancelled = True
        if self._in_flight is not None:
            self._in_flight.succeed()
        if self._target is not None:
            self._target.link.cancel(self._request.request_id)

    async def _next_attempt(self) -> tuple[TargetConnection, CompletionRequest, Sequence[int]]:
        """The next target, the request from the committed tokens on, and the hashes of its blocks."""
        average = self.stats[-1].accepted_average if self.stats else None
        request = replace(self._request, committed=tuple(self._committed), accepted_average=average)
        request = self._scored_prompt.left_of(request)
        # A prompt whose log-probabilities are wanted is computed from its beginning, whatever a target has cached.
        blocks = block_hashes(request.tokens, salt=request.cache_salt) if self._scored_prompt.complete else ()
        with self._tracing.start("wait_for_target", request.trace_parent):
            return await self._next_target(request, blocks), request, blocks

    def _attempt(self, target: TargetConnection, request: CompletionRequest) -> TraceSpan:
        """The span of the request at one target."""
        if not request.trace_parent:
            return NO_SPAN
        host, _, port = target.record.address.rpartition(":")
        attributes: Attributes = {
            "gen_ai.request.id": request.request_id,
            "server.address": host,
            "server.port": int(port),
            "paceline.worker.id": target.record.worker_id,
            "paceline.committed_tokens": len(request.committed),
        }
        return self._tracing.start("attempt", request.trace_parent, attributes, role="client")

    async def _next_target(self, request: CompletionRequest, blocks: Sequence[int]) -> TargetConnection:
        """Choose a target, or wait for one. One that refused the request is chosen only if there is no other.

        Raises `UnavailableError` if none comes in time.
        """
        needed, session = request.needed_capabilities, request.session
        while (chosen := self._fleet.choose(request, blocks, needed, session, self._refused_by, self.numerics)) is None:
            if not await self._fleet.wait_for_target(self._resume_s, needed):
                raise UnavailableError(f"no target came within {self._resume_s:g} s")
        target, candidate = chosen
        self.targets.append(target.record.worker_id)
        if self._replays:
            self._metrics.replayed()
            self._replays = False
            self.replays += 1
        self._metrics.routed(candidate.cached, session=candidate.has_session)
        if self.numerics not in (None, target.numerics):
            log.warning(
                "request %s continues where its tokens may differ: drawn by (%s) so far, by (%s) from now on",
                request.request_id,
                self.numerics or UNKNOWN,
                target.numerics or UNKNOWN,
            )
            self._metrics.replayed_with_other_numerics()
        return target

    def _note_refusal(self) -> bool:
        """Remember which target refused. Returns whether another one is asked.

        If it refuses, too, the request is at fault and no target is.
        """
        first, self._refused_by = self._refused_by, self._target
        return first is None and self._fleet.has_other_than(self._target, self._request.needed_capabilities)

    def _note_loss(self, error: ReplayElsewhere) -> None:
        """The target was lost, or it hands the request over. Raises `GenerationError` if too many were lost."""
        log.warning("request %s leaves its target: %s", self._request.request_id, error)
        self._losses += isinstance(error, TargetLost)
        self._engine_deaths += isinstance(error, TargetEngineDied)
        if self._engine_deaths > MAX_ENGINE_DEATHS:
            raise GenerationError(
                f"{self._engine_deaths} engines died while they served this request: it may be why",
                code="engines_died",
                headers={"x-should-retry": "false"},  # OpenAI's clients retry after a 500
            )
        if self._losses > MAX_TARGET_LOSSES:
            raise GenerationError(f"{self._losses} targets were lost while they served this request")
        # A replay that found no target counts when it finds one.
        self._replays |= not isinstance(error, NotSubmitted)

    async def _run_on(
        self, target: TargetConnection, request: CompletionRequest, blocks: Sequence[int]
    ) -> AsyncGenerator[Delta]:
        """Submit the request to a target and yield its deltas."""
        greedy = request.sampling.greedy
        drafts = self._fleet.drafts.order(greedy=greedy) if request.speculative.enabled is not False else []
        self._target, final = target, None
        earlier = self.stats
        try:
            with (
                self._attempt(target, request) as span,
                InFlightRequest(target, request, blocks, self._fleet.request_cost) as self._in_flight,
            ):
                submitted = replace(request, draft_addresses=drafts, trace_parent=span.trace_parent)
                async with (
                    AsyncExitStack() as quarantine,
                    # Submits at the first iteration, so after the quarantine was entered.
                    aclosing(target.link.submit(submitted)) as deltas,
                ):
                    if self._engine_deaths:
                        await quarantine.enter_async_context(target.quarantine)
                        if not target.up:
                            raise NotSubmitted(f"target {target.record.worker_id} left before the request's turn")
                    async for delta in deltas:
                        if delta.speculation is not None:
                            self.stats = [*earlier, delta.speculation]
                            final = delta.speculation if delta.finish_reason is not None else None
                        self._record(delta, target, self._in_flight)
                        if delta.tokens:
                            await quarantine.aclose()
                        yield delta
        finally:
            self._fleet.drafts.record_request(drafts, final, greedy=greedy)

    def _record(self, delta: Delta, target: TargetConnection, in_flight: InFlightRequest) -> None:
        """Keep what a replay and the routing need of a delta. Raises the error that it reports."""
        self._raise_error_of(delta)
        self._scored_prompt.take(delta)
        self._committed += delta.tokens
        in_flight.add_tokens(delta.tokens)
        if delta.finish_reason is not None:
            in_flight.succeed()
        if delta.tokens:
            self._losses = self._engine_deaths = 0
            self.numerics = target.numerics
            if self._refused_by is not None and self._refused_by is not target:
                self._fleet.record_failure(self._refused_by)  # this target serves what the other one refused
            self._refused_by = None

    def _raise_error_of(self, delta: Delta) -> None:
        """Raises the error that a delta reports.

        After the first token an error is the request's own, such as a grammar that grows too large: a target that fails
        is lost instead.
        """
        if delta.finish_reason == FinishReason.ERROR:
            message = delta.error or "the target failed"
            if message.startswith(GRAMMAR_ERROR) and not self._committed:
                raise InvalidRequestError(message, param="structured_outputs")  # any target would say the same
            if not self._committed and not delta.tokens:
                raise TargetRefusedError(message)
            raise GenerationError(message)
        if delta.finish_reason == FinishReason.CANCELLED and not self._cancelled:
            raise GenerationError("the target cancelled the request")


class ScoredPrompt:
    """Lets every position of the prompt pass once: a target that takes over begins with the first one again."""

    def __init__(self, request: GenerationRequest) -> None:
        wanted = request.sampling.prompt_logprobs is not None
        self._end = len(request.prompt) if wanted else 1
        self._next = 1
        """The first position that has not come."""

    @property
    def complete(self) -> bool:
        """Whether all positions have come, or none are wanted."""
        return self._next >= self._end

    def left_of(self, request: CompletionRequest) -> CompletionRequest:
        """The request without what has come."""
        if not self.complete or request.sampling.prompt_logprobs is None:
            return request
        return replace(request, sampling=request.sampling.model_copy(update={"prompt_logprobs": None}))

    def take(self, delta: Delta) -> None:
        """Cut what has come before from a delta. Raises `GenerationError` if its target has left out a position."""
        parts = []
        for part in delta.prompt_log_probs:
            known, end = self._next - part.start, part.start + len(part.entries)
            if known < 0 or end > self._end:
                raise GenerationError(f"the target sent log-probabilities from position {part.start} of the prompt on")
            if end > self._next:
                parts.append(PromptLogProbs(self._next, part.entries[known:]))
                self._next = end
        delta.prompt_log_probs = parts
        if (delta.tokens or delta.finish_reason in COMPLETED) and not self.complete:
            raise GenerationError(f"the target sent no log-probability of the prompt's token {self._next}")
