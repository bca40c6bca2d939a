"""Responses that take a while: server-sent events, and cancellation when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline_services.gateway.api_errors import ApiError, GenerationError
from paceline_services.gateway.http.json_body import Json, encode_json

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    `data` is written as JSON, or as it is if it is a text. An empty `event` is left out.
    """

    data: Json | str
    event: str = ""
    id: str | None = None
    """None: left out. "": clients forget the id of the event before."""

    def encode(self) -> bytes:
        text = self.data if isinstance(self.data, str) else encode_json(self.data)
        lines = [] if self.id is None else [f"id: {self.id}"]
        lines += [f"event: {self.event}"] if self.event else []
        lines += [f"data: {line}" for line in text.split("\n")]
        return ("\n".join(lines) + "\n\n").encode()


LAST_EVENT_ID_HEADER = "last-event-id"
"""The id of the last event that the client has, as browsers and their libraries send it when they reconnect."""
CLIENT_READ_TIMEOUT_S = 60.0
"""After this long without reading, a client's request is cancelled."""
DONE = ServerSentEvent("[DONE]").encode()
"""The end of OpenAI's streams of chunks."""
PING_S = 15.0
"""Seconds of silence after which a stream says that it lives, unless the gateway is told otherwise."""
COMMENT = b": ping\n\n"
"""A line that clients of server-sent events read over."""


class ClientGoneError(Exception):
    """The client has left, or does not read its response."""


def openai_error(error: ApiError) -> ServerSentEvent:
    """An error as a chunk of OpenAI's streams."""
    return ServerSentEvent(error.body)


class EventStream(Response):
    """Server-sent events.

    Nothing is sent before the first event: an error before it is an ordinary error response. A later error is the last
    event. A stream that is silent for the application's `state.ping_s` sends a ping, also before the first event. When
    the client leaves, the generator of events is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent],
        closing: bytes = DONE,
        error: Callable[[ApiError], ServerSentEvent] = openai_error,
        ping: bytes = COMMENT,
    ) -> None:
        """`closing`: what is sent after the last event. `error`: the API's event for an error. `ping`: what clients of
        the API read over."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._closing = closing
        self._error = error
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send, self.raw_headers)
        ping_s = scope["app"].state.ping_s if "app" in scope else 0.0
        try:
            async with body.pinging(self._ping, ping_s):
                await while_connected(receive, self._send_all(body))
        except ClientGoneError:
            log.debug("client of %s left", scope.get("path"))

    async def _send_all(self, body: _Body) -> None:
        async with aclosing(self._events):
            try:
                async for each in self._events:
                    await body.write(each.encode())
            except ClientGoneError:
                raise
            except ApiError as error:
                if not body.has_started:
                    raise
                await body.write(self._error(error).encode())
            except Exception:
                if not body.has_started:
                    raise
                log.exception("a stream failed")
                await body.write(self._error(GenerationError("the gateway failed")).encode())
            await body.write(self._closing, last=True)


class _Body:
    """A response that begins with its first part."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = False
        self._send, self._headers = send, headers
        self._sending = asyncio.Lock()
        self._wrote_at = time.monotonic()

    async def write(self, part: bytes, *, last: bool = False) -> None:
        """Raises `ClientGoneError` if the client reads nothing for `CLIENT_READ_TIMEOUT_S`."""
        async with self._sending:
            if not self.has_started:
                self.has_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._wrote_at = time.monotonic()
            await send_within_timeout(self._send({"type": "http.response.body", "body": part, "more_body": not last}))

    @asynccontextmanager
    async def pinging(self, ping: bytes, after_s: float) -> AsyncIterator[None]:
        """Write `ping` whenever nothing was written for so long; 0: never."""
        task = asyncio.create_task(self._ping(ping, after_s)) if after_s > 0 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _ping(self, ping: bytes, after_s: float) -> None:
        while True:
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= after_s:
                with suppress(ClientGoneError):  # the next event finds out
                    await self.write(ping)
            else:
                await asyncio.sleep(after_s - silent_s)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work. If the client disconnects first, cancel the work and raise `ClientGoneError`."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait([working, watching])


async def send_within_timeout(sending: Awaitable[None]) -> None:
    """Wait until the data is sent. Raises `ClientGoneError` if the client reads nothing for `CLIENT_READ_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(CLIENT_READ_TIMEOUT_S):
            await sending
    except TimeoutError:
        raise ClientGoneError from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
