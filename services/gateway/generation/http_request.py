"""What every generation over HTTP begins with: a body within the limits, a journal, a span; and the ids of its events.

Streams survive their gateway: a request with `Last-Event-ID` continues after the last event that its client has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from starlette.requests import ClientDisconnect

from paceline.telemetry.tracing import TraceSpan
from paceline_services.gateway.api_errors import CLOSE_CONNECTION, MAX_ECHOED, InvalidRequestError, OverloadedError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.completion_request import REQUEST_HEADERS
from paceline_services.gateway.generation.journal import Journal, Journals
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.request_trace import start_request_span
from paceline_services.gateway.http.auth_middleware import client_of
from paceline_services.gateway.http.event_stream import LAST_EVENT_ID_HEADER, ClientGoneError, ServerSentEvent
from paceline_services.gateway.http.http_metrics import REQUEST_ID, SPAN

IDENTITY = "identity"
"""The encoding of a body that is sent as it is (RFC 9110)."""
EVENT_ID = re.compile(r"([0-9a-f]{32}):([0-9]{1,9})")
"""The request's id, and the event's number in its stream."""


async def begin_request(
    request: Request, models: ModelDirectory, journals: Journals, *, chat: bool
) -> tuple[Journal, ApiClient, TraceSpan]:
    """What every generation begins with: its journal with the body, its client, and its span. `chat`: names the span.

    Raises as `ModelDirectory.check_capacity` and `_open_journal`.
    """
    models.check_capacity()
    span = request.scope["state"][SPAN] = start_request_span(models.first.tracing, request.headers, chat=chat)
    return await _open_journal(request, models, journals), client_of(request), span


async def numbered(journal: Journal, events: AsyncGenerator[ServerSentEvent]) -> AsyncGenerator[ServerSentEvent]:
    """The events that the client has not seen, with their ids.

    Raises `InvalidRequestError` (404) at the end of a stream that is shorter than what the client has seen.
    """
    number = 0
    async with aclosing(events):
        async for event in events:
            number += 1
            if number > journal.seen:
                yield ServerSentEvent(event.data, event.event, journal.event_id(number))
    if number < journal.seen:
        message = f"the stream has {number} events, fewer than its client says to have"
        raise InvalidRequestError(message, code="stream_not_found", status=404)


async def _open_journal(request: Request, models: ModelDirectory, journals: Journals) -> Journal:
    """The journal of a new request, whose body is read; with `Last-Event-ID` that of the request to be continued.

    Raises as `read_body`; `InvalidRequestError` (404) if the journal is not there, `UnavailableError` without Redis.
    """
    state, path = request.scope["state"], request.url.path
    client = client_of(request).name
    if not (last := request.headers.get(LAST_EVENT_ID_HEADER)):
        body = await read_body(request, models)
        headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
        return Journal(journals, client, state[REQUEST_ID], path, body, headers)
    known = EVENT_ID.fullmatch(last)
    journal = await journals.find(client, known[1]) if known else None
    if known is None or journal is None or journal.path != path:
        why = "it is unknown, has expired, or was not kept" if journals.enabled else "this server keeps no streams"
        message = f"Last-Event-ID: no stream {last[:MAX_ECHOED]!r} can be resumed: {why}"
        raise InvalidRequestError(message, param="Last-Event-ID", code="stream_not_found", status=404)
    journal.seen = int(known[2])
    state[REQUEST_ID] = journal.id
    return journal


async def read_body(request: Request, models: ModelDirectory) -> bytes:
    """Read the body within the limits. Raises `InvalidRequestError`, `OverloadedError` or `ClientGoneError`."""
    if (encoding := request.headers.get("content-encoding", IDENTITY).strip().lower()) not in ("", IDENTITY):
        raise InvalidRequestError(
            f"content-encoding {encoding[:MAX_ECHOED]} is not read: send the body as it is",
            status=415,
            code="unsupported_encoding",
            headers={"accept-encoding": IDENTITY, **CLOSE_CONNECTION},
        )
    capacity, limits = models.capacity, models.capacity.limits
    body = bytearray()
    try:
        async with asyncio.timeout(limits.max_body_s):
            async for part in request.stream():
                body += part
                capacity.bytes_reading += len(part)
                if len(body) > limits.max_body_bytes:
                    raise InvalidRequestError(
                        f"the request body exceeds the limit of {limits.max_body_bytes} bytes",
                        status=413,
                        code="body_too_large",
                        headers=CLOSE_CONNECTION,
                    )
                capacity.check_body(len(body))
    except TimeoutError:
        raise InvalidRequestError(
            f"the request body did not come within {limits.max_body_s:g} s",
            status=408,
            code="body_too_slow",
            headers=CLOSE_CONNECTION,
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    except OverloadedError as error:
        models.count_rejection(error)
        raise
    finally:
        capacity.bytes_reading -= len(body)
    return bytes(body)
