"""Requests that their clients can abort by an id of their own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline_services.gateway.api_errors import ApiError


class RequestAbortedError(ApiError):
    """The client has aborted the request."""


class RunningRequests:
    """The running requests of one gateway. Use it from one event loop."""

    def __init__(self) -> None:
        self._running: defaultdict[tuple[str, str], set[asyncio.Timeout]] = defaultdict(set)
        """By client and id. Aborting a request is its timeout."""

    @asynccontextmanager
    async def abortable(self, client: str, request_id: str) -> AsyncIterator[None]:
        """Let `abort` end what the context does: with `RequestAbortedError`. Without an id nothing can."""
        if not request_id:
            yield
            return
        key = client, request_id
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._running[key].add(timeout)
                yield
        except TimeoutError:
            if timeout.expired():
                raise RequestAbortedError(f"request {request_id} was aborted") from None
            raise
        finally:
            self._running[key].discard(timeout)
            if not self._running[key]:
                del self._running[key]

    def abort(self, client: str, request_id: str) -> int:
        """End the client's requests with this id, and return how many there were."""
        found = self._running.pop((client, request_id), set())
        for timeout in found:
            timeout.reschedule(asyncio.get_running_loop().time())
        return len(found)
