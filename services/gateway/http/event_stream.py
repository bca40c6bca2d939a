"""Responses that take a while: server-sent events, and cancellation when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline_services.gateway.api_errors import ApiError, GenerationError
from paceline_services.gateway.http.server_sent_event import ServerSentEvent

log = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_READ_TIMEOUT_S = 60.0
"""After this long without reading, a client's request is cancelled."""
DONE = ServerSentEvent("[DONE]").encode()
"""The end of OpenAI's streams of chunks."""


class ClientGoneError(Exception):
    """The client has left, or does not read its response."""


def openai_error(error: ApiError) -> ServerSentEvent:
    """An error as a chunk of OpenAI's streams."""
    return ServerSentEvent(error.body)


class EventStream(Response):
    """Server-sent events.

    Nothing is sent before the first event: an error before it is an ordinary error response. A later error is the last
    event. When the client leaves, the generator of events is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent],
        closing: bytes = DONE,
        error: Callable[[ApiError], ServerSentEvent] = openai_error,
    ) -> None:
        """`closing`: what is sent after the last event. `error`: the API's event for an error."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._closing = closing
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            log.debug("client of %s left", scope.get("path"))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            first = await anext(self._events, None)  # a client that resumes may have seen all of them
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                if first is not None:
                    await send_within_timeout(send(_body_message(first)))
                async for each in self._events:
                    await send_within_timeout(send(_body_message(each)))
            except ClientGoneError:
                raise
            except ApiError as error:
                await send_within_timeout(send(_body_message(self._error(error))))
            except Exception:
                log.exception("a stream failed")
                await send_within_timeout(send(_body_message(self._error(GenerationError("the gateway failed")))))
            await send_within_timeout(send({"type": "http.response.body", "body": self._closing, "more_body": False}))


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


def _body_message(event: ServerSentEvent) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}
