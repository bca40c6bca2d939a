"""The API requests that a model serves now, by the ids that their clients know: a client can end them, and ask for
what is known of them."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic_core import to_json

from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.memory_store import MemoryAcceptance
from paceline.state.redis_availability import RedisAvailability
from paceline_services.gateway.generation.failover import FailoverRequest
from paceline_services.gateway.generation.usage import speculation_json

RESPONSE_ID = re.compile(r"[a-z]+[-_](.+)")
"""The id of a response: a prefix that its API has, and an id of the request, the client's or the gateway's own."""

T = TypeVar("T")


class RunningRequest:
    """One API request with all its completions."""

    def __init__(self, model: str, id_: str) -> None:
        self.aborted = False
        self.ended = False
        self.runs: list[FailoverRequest] = []
        """Its completions that have begun."""
        self._model = model
        self._id = id_
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

    def report(self) -> str | None:
        """What is known of the request, as JSON; None if no completion has begun here."""
        if not self.runs:
            return None
        report = {
            "id": self._id,
            "object": "request",
            "model": self._model,
            "state": "finished" if self.ended else "running",
            "completion_tokens": sum(run.tokens for run in self.runs),
            "targets": list(dict.fromkeys(target for run in self.runs for target in run.targets)),
            "replays": sum(run.replays for run in self.runs),
            "speculation": speculation_json([stats for run in self.runs for stats in run.stats]),
        }
        return to_json(report).decode()


class RunningRequests:
    """The running requests of one model."""

    def __init__(self, model: str = "", recorder: AcceptanceRecorder | None = None) -> None:
        """`recorder`: keeps reports for other gateways, and for a while; None: there are none but those of here."""
        self._model = model
        self._recorder = recorder or AcceptanceRecorder(MemoryAcceptance(), RedisAvailability(), 1.0)
        self._by_id: defaultdict[tuple[str, str], list[RunningRequest]] = defaultdict(list)

    @contextmanager
    def track(self, client: str, *ids: str) -> Iterator[RunningRequest]:
        """A request of the client runs while the context lasts. `ids`: by which the client may name it; "": none."""
        request = RunningRequest(self._model, ids[0])
        keys = {(client, id_) for id_ in ids if id_}
        for key in keys:
            self._by_id[key].append(request)
        with self._recorder.reporting(keys, request.report):
            try:
                yield request
            finally:
                request.ended = True
                for key in keys:
                    self._by_id[key].remove(request)
                    if not self._by_id[key]:
                        del self._by_id[key]

    def leave(self, client: str, id_: str) -> None:
        """The client's request with this id goes on at another gateway, which reports of it."""
        for request in self._by_id.get((client, id_), ()):
            request.runs.clear()

    def abort(self, client: str, id_: str) -> bool:
        """End the client's requests with this id, of a request or of a response. Returns whether there was one."""
        requests = next(filter(None, (self._by_id.get((client, each)) for each in _ids(id_))), ())
        for request in requests:
            request.abort()
        return bool(requests)

    async def report(self, client: str, id_: str) -> str | None:
        """What is known of the client's request with this id; None: nothing. Raises `StateUnavailableError`."""
        for each in _ids(id_):
            if (report := await self._recorder.request((client, each))) is not None:
                return report
        return None

    def abort_all(self, make_error: Callable[[], Exception]) -> None:
        """End all requests, each with an error of its own."""
        for request in {request for requests in self._by_id.values() for request in requests}:
            request.abort(make_error())


def _ids(id_: str) -> Sequence[str]:
    """A request's own id, by the id of the request or of its response."""
    response_id = RESPONSE_ID.fullmatch(id_)
    return (id_, response_id[1]) if response_id else (id_,)
