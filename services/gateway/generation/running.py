"""The API requests that a model serves now, by the ids that their clients know, so that a client can end them early."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

RESPONSE_ID = re.compile(r"[a-z]+[-_](.+)")
"""The id of a response: a prefix that its API has, and an id of the request, the client's or the gateway's own."""

T = TypeVar("T")


class RunningRequest:
    """One API request with all its completions."""

    def __init__(self) -> None:
        self.aborted = False
        self._error: Exception | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def abort(self, error: Exception | None = None) -> None:
        """End the request now, whatever its target does; with this error if one is given."""
        if self.aborted:
            return
        self.aborted, self._error = True, error
        if self._waiting is not None:
            self._waiting.cancel()

    async def next(self, items: AsyncIterator[T]) -> T | None:
        """The next item; None: there is none, or the request is aborted. `abort` cancels the wait for the item.

        Only this wait is cancelled, never what the task does with an item, such as sending it to the client. Raises
        the error of `abort`.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            if not self.aborted:
                self._waiting = task
                return await anext(items)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            if not self.aborted or task.uncancel() > 0:  # something else has cancelled the task, too
                raise
        finally:
            self._waiting = None
        if self._error is not None:
            raise self._error
        return None


class RunningRequests:
    """The running requests of one model."""

    def __init__(self) -> None:
        self._by_id: defaultdict[tuple[str, str], list[RunningRequest]] = defaultdict(list)

    @contextmanager
    def track(self, client: str, *ids: str) -> Iterator[RunningRequest]:
        """A request of the client runs while the context lasts. `ids`: by which the client may name it; "": none."""
        request = RunningRequest()
        keys = {(client, id_) for id_ in ids if id_}
        for key in keys:
            self._by_id[key].append(request)
        try:
            yield request
        finally:
            for key in keys:
                self._by_id[key].remove(request)
                if not self._by_id[key]:
                    del self._by_id[key]

    def abort(self, client: str, id_: str) -> bool:
        """End the client's requests with this id, of a request or of a response. Returns whether there was one."""
        response_id = RESPONSE_ID.fullmatch(id_)
        requests = self._by_id.get((client, id_)) or (response_id and self._by_id.get((client, response_id[1])))
        for request in requests or ():
            request.abort()
        return bool(requests)

    def abort_all(self, make_error: Callable[[], Exception]) -> None:
        """End all requests, each with an error of its own."""
        for request in {request for requests in self._by_id.values() for request in requests}:
            request.abort(make_error())
