"""Whether a draft worker pays, judged by all its requests together, and by each one alone where it does not."""

from __future__ import annotations

from collections.abc import Callable

from paceline.budget import Worth
from paceline.engine.request import Request


class Trial:
    """One draft worker, for as long as an engine knows it.

    While the draft does not pay, its requests are paused: it is told of their commits, and computes nothing. A request
    to which it brings enough all the same stays unpaused. To see whether the draft has changed, one request, the most
    promising of the paused ones, is drafted for again (the scout). What this one learns holds for all.
    """

    def __init__(self, tell: Callable[[Request], None], least: float | None = None) -> None:
        """`tell`: let the draft know that this request was paused, or resumed. `least`: see `Worth`."""
        self.requests: dict[int, Request] = {}
        self._tell = tell
        self._worth = Worth(least)
        self._scout: Request | None = None
        self._counted: list[tuple[Request, int]] = []

    def join(self, request: Request) -> None:
        """The draft has been opened for this request, unpaused."""
        self.requests[request.key] = request
        request.paused = request.heard = False
        request.brings = Worth.HOPE if self._worth.pays else self._worth.least  # then it is the next scout
        self._decide(request)

    def leave(self, key: int) -> None:
        self.requests.pop(key, None)

    def count(self, request: Request, accepted: int) -> None:
        """In this step, one of its requests committed so many of its guesses."""
        self._counted.append((request, accepted))

    def judge(self, lost: float = 0.0) -> None:
        """A step has ended. `lost`: tokens that drafting cost each request that is drafted for.

        Guesses that come too late are as good as wrong ones; but before the first comes, there is nothing to judge.
        """
        counted, self._counted = self._counted, []
        heard = [(request, accepted - lost) for request, accepted in counted if request.heard]
        for request, brought in heard:
            request.brings += Worth.LEARNING * (brought - request.brings)
        scouted = [brought for request, brought in heard if self._scout in (None, request)]
        if scouted or (counted and self._worth.paused):
            self._worth.observe(sum(scouted) / max(len(scouted), 1))
        if not self._worth.tried:
            self._scout = None
        elif self._scout is None or self._scout.key not in self.requests:
            paused = (request for request in self.requests.values() if request.paused)
            self._scout = max(paused, key=lambda request: request.brings, default=None)
        for request in self.requests.values():
            self._decide(request)

    def _decide(self, request: Request) -> None:
        spared = request.brings > self._worth.least
        paused = not (self._worth.pays or spared or request is self._scout)
        if request.paused is not paused:
            request.paused, request.heard = paused, False
            self._tell(request)
