"""One choice's way through the targets: submit, follow, and resume elsewhere when a target is lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

from paceline.core.messages import GRAMMAR_ERROR, Delta, FinishReason, Submission
from paceline.telemetry.gateway_metrics import RequestMetrics
from paceline.wire.link_errors import HandedOver, TargetEngineDied, TargetLost, WireError
from paceline_services.gateway.api_errors import EnginesDiedError, GenerationError, InvalidRequestError, NoTargetError
from paceline_services.gateway.routing.fleet import Fleet, RoutedTarget
from paceline_services.gateway.routing.target_worker import InFlightRequest, RoutingPrompt, Target

log = logging.getLogger(__name__)

MAX_TARGET_LOSSES = 4
"""A request that was on more targets than these when they were lost ends."""
MAX_ENGINE_DEATHS = 1
"""One with which more engines than these died before it drew another token ends, too: it may be what kills them."""
UNKNOWN = "a worker that does not say"


class TargetRefusedError(Exception):
    """A target ended the request with an error before its first token. Whose fault that is, another one can tell."""


class FailoverRequest:
    """Yields the deltas of one submission. Losing a target is a pause: another one takes over.

    Same seed, same prompt, same committed tokens, same numerics: it draws exactly what the lost one would have drawn.
    Once there are tokens, a target with other numerics takes over only if none has the same, and a warning says so.

    When an engine dies, any request that it served may be why. Each of them is tried elsewhere while no other such
    request is, so that the next engine that dies tells them apart.
    """

    def __init__(
        self,
        fleet: Fleet,
        submission: Submission,
        resume_s: float,
        progress: RequestMetrics,
        session: str = "",
    ) -> None:
        """`resume_s`: how long to wait for another target when the last one was lost.

        `session`: its conversation, among those of whoever says the same cache salt.
        """
        self._fleet = fleet
        self._submission = submission
        self._resume_s = resume_s
        self._session = session and f"{submission.cache_salt}:{session}"
        self._committed: list[int] = list(submission.committed)
        self._numerics: str | None = None  # of the target that drew the latest token
        self._target: Target | None = None
        self._in_flight: InFlightRequest | None = None
        self._refused_by: Target | None = None
        self._deaths = 0  # of engines since the latest token
        self._progress = progress
        self._cancelled = False

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Raises an `ApiError` if the request cannot be served. Closing it cancels the request at its target."""
        losses = 0
        while losses <= MAX_TARGET_LOSSES:
            try:
                text = RoutingPrompt.of([*self._submission.prompt, *self._committed], self._submission.cache_salt)
                async with aclosing(self._run_on(await self._next_target(text), text)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except WireError as error:
                raise InvalidRequestError(str(error)) from error
            except TargetRefusedError as error:
                if not self._may_retry_refused():
                    raise GenerationError(str(error)) from error
                continue
            except TargetLost as error:
                losses += not isinstance(error, HandedOver)  # a long one may live through many roll-outs
                self._deaths += isinstance(error, TargetEngineDied)
                log.warning("request %s moves on: %s", self._submission.request_id, error)
            if self._deaths > MAX_ENGINE_DEATHS:
                raise EnginesDiedError(f"{self._deaths} engines died while they served this request: it may be why")
            if self._cancelled:
                return
            self._progress.replayed()
        raise GenerationError(f"{losses} targets were lost while they served this request")

    def finish_early(self) -> None:
        """It has said all it had to say, and well. The last delta still comes, with the request's statistics."""
        self._cancelled = True
        if self._in_flight is not None:
            self._in_flight.succeed()
        if self._target is not None:
            self._target.link.cancel(self._submission.request_id)

    async def _next_target(self, text: RoutingPrompt) -> Target:
        while (chosen := self._choose_target(text)) is None:
            if not await self._fleet.wait_for_target(self._resume_s):
                raise NoTargetError(f"the target was lost and no other came within {self._resume_s:g} s")
        self._progress.routed(chosen.candidate.cached, session=chosen.candidate.has_session)
        if self._numerics not in (None, chosen.target.numerics):
            log.warning(
                "request %s continues where its tokens may differ: drawn by (%s) so far, by (%s) from now on",
                self._submission.request_id,
                self._numerics or UNKNOWN,
                chosen.target.numerics or UNKNOWN,
            )
            self._progress.replayed_with_other_numerics()
        return chosen.target

    def _choose_target(self, text: RoutingPrompt) -> RoutedTarget | None:
        """Who refused it is asked again only if nobody else is left."""
        but = (self._refused_by,) if self._refused_by else ()
        choose = partial(self._fleet.choose, text, self._session, numerics=self._numerics)
        return choose(but) or choose()

    def _may_retry_refused(self) -> bool:
        """A second opinion is had once: if it is the same, the request is at fault and no target is blamed."""
        first, self._refused_by = self._refused_by, self._target
        return first is None and self._fleet.has_other_than(self._target)

    async def _run_on(self, target: Target, text: RoutingPrompt) -> AsyncGenerator[Delta]:
        """The request's deltas from one target, which starts after everything committed before."""
        greedy = self._submission.sampling.temperature == 0
        wants_drafts = self._submission.speculative.enabled is not False
        offered = self._fleet.drafts.order(greedy=greedy) if wants_drafts else []
        submission = replace(self._submission, committed=tuple(self._committed), drafts=offered)
        left = submission.sampling.max_tokens - len(self._committed)
        self._target, stats = target, None
        try:
            with InFlightRequest(target, text, left, self._fleet.request_cost, self._fleet.throughput) as stay:
                self._in_flight = stay
                async with AsyncExitStack() as alone, aclosing(target.link.submit(submission)) as deltas:
                    if self._deaths:
                        await alone.enter_async_context(target.quarantine)
                        if not target.up:
                            raise HandedOver(f"target {target.record.worker_id} went before the request's turn came")
                    async for delta in deltas:
                        stats = delta.speculation
                        self._check(delta)
                        self._committed += delta.tokens
                        stay.add_tokens(delta.tokens)
                        if delta.finish_reason is not None:
                            stay.succeed()
                        if delta.tokens:
                            self._deaths = 0
                            await alone.aclose()
                            self._numerics = target.numerics
                            self._confirm_refusal(target)
                        yield delta
        finally:
            self._fleet.drafts.record_request(offered, stats, greedy=greedy)

    def _confirm_refusal(self, target: Target) -> None:
        """This target does what another one may have refused."""
        if self._refused_by is not None and self._refused_by is not target:
            self._fleet.record_failure(self._refused_by)
        self._refused_by = None

    def _check(self, delta: Delta) -> None:
        """Nobody is blamed for an error after the first token: a target that fails is lost, one that answers has met a
        request that cannot go on, such as a grammar that grows too large."""
        if delta.finish_reason == FinishReason.ERROR:
            message = delta.error or "the target failed"
            if message.startswith(GRAMMAR_ERROR) and not self._committed:
                raise InvalidRequestError(message, param="structured_outputs")  # as every other target would say
            if not self._committed and not delta.tokens:
                raise TargetRefusedError(message)
            raise GenerationError(message)
        if delta.finish_reason == FinishReason.CANCELLED and not self._cancelled:
            raise GenerationError("the target cancelled the request")
