"""Requests whose grammars are being compiled, or replayed: the engine decodes the others meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.request import Request

IDLE_WAIT_S = 0.01
"""How long a step waits for a grammar when there is nothing else to do."""


class GrammarQueue:
    """In the order in which they came."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def remove(self, request: Request) -> bool:
        """Whether it was here."""
        known = request in self._requests
        if known:
            self._requests.remove(request)
        return known

    def clear(self) -> None:
        self._requests.clear()

    def done(self, *, idle: bool) -> Iterable[Request]:
        """Those whose grammars are ready; they leave. `idle`: nobody has anything else to do."""
        if not self._requests:
            return ()
        if idle and (grammar := self._requests[0].grammar) is not None:
            grammar.wait(IDLE_WAIT_S)
        done = [request for request in self._requests if request.grammar is None or request.grammar.ready]
        self._requests = [request for request in self._requests if request not in done]
        return done
