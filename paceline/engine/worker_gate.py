"""Whether a draft worker pays, judged by all its requests together, and by each one alone where it does not."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.policy.draft_gate import DraftGate
from paceline.engine.request import Request


class WorkerGate:
    """One draft worker, for as long as an engine knows it.

    While the draft does not pay, its requests are paused: it is told of their commits, and computes nothing. A request
    to which it brings enough all the same stays unpaused. To see whether the draft has changed, one request, the most
    promising of the paused ones, is drafted for again (the scout). What this one learns holds for all.
    """

    def __init__(self, tell: Callable[[Request], None], least: float | None = None) -> None:
        """`tell`: let the draft know that this request was paused, or resumed. `least`: see `DraftGate`."""
        self.requests: dict[int, Request] = {}
        self._on_change = tell
        self._gate = DraftGate(least)
        self._scout: Request | None = None
        self._accepted: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        """The draft has been opened for this request, unpaused."""
        self.requests[request.key] = request
        request.paused = request.draft_started = False
        request.accepted_average = (
            DraftGate.PRIOR_ACCEPTED if self._gate.pays else self._gate.pause_below
        )  # then it is the next scout
        self._update_pause(request)

    def remove(self, key: int) -> None:
        self.requests.pop(key, None)

    def record_accepted(self, request: Request, accepted: int) -> None:
        """In this step, one of its requests committed so many of its guesses."""
        self._accepted.append((request, accepted))

    def end_step(self, lost: float = 0.0) -> None:
        """A step has ended. `lost`: tokens that drafting cost each request that is drafted for.

        Guesses that come too late are as good as wrong ones; but before the first comes, there is nothing to judge.
        """
        counted, self._accepted = self._accepted, []
        heard = [(request, accepted - lost) for request, accepted in counted if request.draft_started]
        for request, brought in heard:
            request.accepted_average += DraftGate.LEARNING_RATE * (brought - request.accepted_average)
        scouted = [brought for request, brought in heard if self._scout in (None, request)]
        if scouted or (counted and self._gate.paused):
            self._gate.observe(sum(scouted) / max(len(scouted), 1))
        if not self._gate.probing:
            self._scout = None
        elif self._scout is None or self._scout.key not in self.requests:
            paused = (request for request in self.requests.values() if request.paused)
            self._scout = max(paused, key=lambda request: request.accepted_average, default=None)
        for request in self.requests.values():
            self._update_pause(request)

    def _update_pause(self, request: Request) -> None:
        spared = request.accepted_average > self._gate.pause_below
        paused = not (self._gate.pays or spared or request is self._scout)
        if request.paused is not paused:
            request.paused, request.draft_started = paused, False
            self._on_change(request)
