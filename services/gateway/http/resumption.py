"""Streams that survive their gateway: the ids of events, and requests that continue after the last event seen."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request

from paceline.telemetry.tracing import TraceSpan
from paceline_services.gateway.api_errors import MAX_ECHOED, InvalidRequestError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.journal import Journal, Journals
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.request_trace import start_request_span
from paceline_services.gateway.http.auth_middleware import client_of
from paceline_services.gateway.http.http_body import read_body
from paceline_services.gateway.http.http_metrics import REQUEST_ID, SPAN
from paceline_services.gateway.http.server_sent_event import ServerSentEvent
from paceline_services.gateway.request_headers import LAST_EVENT_ID_HEADER, REQUEST_HEADERS

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
