"""Whether a draft worker pays, judged by all its requests together."""

from __future__ import annotations

from collections.abc import Callable

from paceline.budget import Worth
from paceline.engine.request import Request


class Trial:
    """One draft worker, for as long as an engine knows it.

    While it does not pay, its requests are paused: it follows their commits, and grows nothing. To see whether that has
    changed, one of them, the *scout*, is drafted for again. What the scout learns holds for all.
    """

    def __init__(self, tell: Callable[[Request], None]) -> None:
        """`tell`: let the draft know that this request was paused, or resumed."""
        self.requests: dict[int, Request] = {}
        self._tell = tell
        self._worth = Worth()
        self._scout: int | None = None
        self._brought: list[int] = []
        self._stepped = False

    def join(self, request: Request) -> None:
        """The draft has been opened for this request, unpaused."""
        self.requests[request.key] = request
        request.paused = request.heard = False
        if not self._worth.pays:
            self._pause(request, True)

    def leave(self, key: int) -> None:
        self.requests.pop(key, None)

    def count(self, request: Request, accepted: int) -> None:
        """In this step, one of its requests committed so many of its guesses.

        Guesses that come too late are as good as wrong ones; but before the first comes, there is nothing to judge.
        """
        self._stepped = True
        if request.heard:
            self._brought.append(accepted)

    def judge(self) -> None:
        """A step has ended."""
        if self._stepped and (self._brought or self._worth.paused):
            self._worth.observe(sum(self._brought) / max(len(self._brought), 1))
        self._stepped, self._brought = False, []
        if self._worth.tried and self._scout not in self.requests:
            self._scout = next(iter(self.requests), None)
        for key, request in self.requests.items():
            self._pause(request, self._worth.paused or (self._worth.tried and key != self._scout))

    def _pause(self, request: Request, paused: bool) -> None:
        if request.paused is not paused:
            request.paused, request.heard = paused, False
            self._tell(request)
