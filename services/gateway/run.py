"""One choice's way through the targets: submit, follow, and resume elsewhere when a target is lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from paceline.messages import Delta, FinishReason, Submission
from paceline.wire.errors import TargetLost, WireError
from services.gateway.errors import GenerationError, InvalidRequestError, NoTargetError
from services.gateway.fleet import Fleet, Target

log = logging.getLogger(__name__)

MOST_MOVES = 4
"""A request that was on so many lost targets may be what kills them; it ends."""


class Run:
    """Yields the deltas of one submission. Losing a target is a pause: another one takes over.

    Same seed, same prompt, same committed tokens: it draws exactly what the lost one would have drawn.
    """

    def __init__(self, fleet: Fleet, submission: Submission, resume_s: float, on_replay: Callable[[], None]) -> None:
        """`resume_s`: how long to wait for another target when the last one was lost. `on_replay`: it was."""
        self._fleet = fleet
        self._submission = submission
        self._resume_s = resume_s
        self._committed: list[int] = list(submission.committed)
        self._target: Target | None = None
        self._on_replay = on_replay
        self._cancelled = False

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Raises an `ApiError` if the request cannot be served. Closing it cancels the request at its target."""
        if not self._fleet.up:
            raise NoTargetError("no target is up; try again in a moment")
        for _ in range(MOST_MOVES + 1):
            try:
                async with aclosing(self._on(await self._next_target())) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except WireError as error:
                raise InvalidRequestError(str(error)) from error
            except TargetLost as error:
                log.warning("request %s moves on: %s", self._submission.request_id, error)
            if self._cancelled:
                return
            self._on_replay()
        raise GenerationError(f"{MOST_MOVES + 1} targets were lost while they served this request")

    def cancel(self) -> None:
        """Ask for the end; the last delta still comes, with the request's statistics."""
        self._cancelled = True
        if self._target is not None:
            self._target.link.cancel(self._submission.request_id)

    async def _next_target(self) -> Target:
        while (target := self._fleet.choose(self._submission.prompt)) is None:
            if not await self._fleet.wait_for_target(self._resume_s):
                raise NoTargetError(f"the target was lost and no other came within {self._resume_s:g} s")
        return target

    async def _on(self, target: Target) -> AsyncGenerator[Delta]:
        """The request's deltas from one target, which starts after everything committed before."""
        submission = replace(self._submission, committed=tuple(self._committed), drafts=self._fleet.drafts())
        self._target = target
        target.in_flight += 1
        try:
            async with aclosing(target.link.submit(submission)) as deltas:
                async for delta in deltas:
                    self._check(delta)
                    self._committed += delta.tokens
                    yield delta
        finally:
            target.in_flight -= 1

    def _check(self, delta: Delta) -> None:
        if delta.finish_reason == FinishReason.ERROR:
            raise GenerationError(delta.error or "the target failed")
        if delta.finish_reason == FinishReason.CANCELLED and not self._cancelled:
            raise GenerationError("the target cancelled the request")
