"""The routes below `/v1/responses`."""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from paceline_services.gateway.api_docs import LEFT_OUT, NUMBER, ApiDescription, describe, list_of, object_of
from paceline_services.gateway.api_errors import MAX_ECHOED, ApiError, InvalidRequestError, RetryLaterError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.http_request import EVENT_ID, begin_request, numbered
from paceline_services.gateway.generation.journal import JournalState, StreamLeftError
from paceline_services.gateway.generation.request_trace import traced
from paceline_services.gateway.generation.resumption import followed, resumable
from paceline_services.gateway.http.auth_middleware import client_of
from paceline_services.gateway.http.event_stream import LAST_EVENT_ID_HEADER, EventStream, while_connected
from paceline_services.gateway.http.json_body import TEXT, Json, JsonResponse
from paceline_services.gateway.responses.background import BackgroundResponses
from paceline_services.gateway.responses.body import ResponseBody
from paceline_services.gateway.responses.generation import ResponseGeneration, ResponseRequests

COLLECTION = "/v1/responses"
ONE = COLLECTION + "/{response_id}"
MAX_LISTED = 100
"""Items in one answer."""


class ItemsQuery(BaseModel):
    """The query of a list of items."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"


def add_responses(app: FastAPI, requests: ResponseRequests, background: BackgroundResponses) -> None:
    """Add the routes, and their description."""
    _add_creation(app, requests, background)
    _add_stored_responses(app, requests)
    _add_endings(app, requests)
    describe(app, DOCS)


def _add_creation(app: FastAPI, requests: ResponseRequests, background: BackgroundResponses) -> None:
    @app.post(COLLECTION, name="responses")
    async def create(request: Request) -> Response:
        journal, client, span = await begin_request(request, requests.models, requests.journals, chat=True)
        made = await requests.prepare(journal, client, span)
        streamed = bool(made.body.stream)
        if made.body.background:
            if journal.state is JournalState.NEW:
                await background.begin(journal, made)
            if streamed:
                return await _streamed(requests, journal.id, client, journal.seen)
            return JsonResponse(made.response.as_json("queued"))
        output = resumable(journal, made.model, [made.request], made.client, streamed=streamed)
        deltas = traced(span, made.model.model, [made.request], output, streamed=streamed)
        if streamed:
            return EventStream(numbered(journal, made.events(deltas)), closing=b"", error=made.error_event)
        return JsonResponse(await while_connected(request.receive, made.whole(deltas)))


def _add_stored_responses(app: FastAPI, requests: ResponseRequests) -> None:
    history = requests.history

    @app.get(ONE)
    async def retrieve(request: Request, response_id: str) -> Response:
        client = client_of(request)
        if request.query_params.get("stream") == "true":
            return await _streamed(requests, _request_id(response_id), client, _events_seen(request, response_id))
        if (response := requests.running.get((client.name, response_id))) is not None:
            return JsonResponse(response.as_json())
        try:
            return JsonResponse((await history.load(client.name, response_id)).response)
        except InvalidRequestError:
            if (made := await _so_far(requests, response_id, client)) is None:
                raise
            return JsonResponse(made.response.as_json())

    @app.get(ONE + "/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query = _items_query(request)
        items = (await history.load(client_of(request).name, response_id)).items
        return JsonResponse(_page(items, query))


def _add_endings(app: FastAPI, requests: ResponseRequests) -> None:
    history, journals = requests.history, requests.journals

    @app.delete(ONE)
    async def delete(request: Request, response_id: str) -> Response:
        """Forgets a response that has ended. One that failed has nothing but its journal."""
        client = client_of(request)
        try:
            await history.delete(client.name, response_id)
        except InvalidRequestError:
            running = requests.running.get((client.name, response_id))
            made = await _so_far(requests, response_id, client) if running is None else None
            if running is None and made is None:
                raise
            if made is None or made.response.failure is None:  # it runs, or has ended just now and is being stored
                message = "response_id: the response has not ended; cancel it first, or try again soon"
                raise InvalidRequestError(
                    message, param="response_id", code="response_in_progress", status=409
                ) from None
        await journals.delete(client.name, _request_id(response_id))
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post(ONE + "/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Ends a response that runs here, or in the background at any gateway."""
        client = client_of(request)
        response = requests.running.get((client.name, response_id))
        if response is not None and not response.ended and requests.models.abort(client.name, response_id):
            return JsonResponse(response.as_json("cancelled"))
        made = await _so_far(requests, response_id, client)
        if made is not None and not made.response.ended:
            journal = await journals.find(client.name, _request_id(response_id))
            if journal is not None:
                await journal.cancel()
                return JsonResponse(made.response.as_json("cancelled"))
        stored = (await history.load(client.name, response_id)).response
        if stored["status"] != "cancelled":
            message = f"response_id: the response has ended ({stored['status']}): it cannot be cancelled"
            raise InvalidRequestError(message, param="response_id")
        return JsonResponse(stored)


async def _so_far(requests: ResponseRequests, response_id: str, client: ApiClient) -> ResponseGeneration | None:
    """What the journal has of a response in the background. Raises `UnavailableError`."""
    journal = await requests.journals.find(client.name, _request_id(response_id))
    if journal is None or journal.path != COLLECTION:
        return None
    made = await requests.prepare(journal, client)
    if not made.body.background:
        return None
    deltas = followed(journal, made.model, [made.request], wait=False)
    try:
        async with aclosing(made.events_elsewhere(deltas)) as events:
            async for _ in events:
                pass
    except (RetryLaterError, StreamLeftError):
        raise
    except ApiError as error:  # before the first delta
        for _ in made.response.fail(error):
            pass
    return made


async def _streamed(requests: ResponseRequests, request_id: str, client: ApiClient, seen: int) -> Response:
    """The stream of a response in the background after the events seen, wherever it runs.

    Raises `InvalidRequestError` or `UnavailableError`.
    """
    journal = await requests.journals.find(client.name, request_id)
    if journal is None or journal.path != COLLECTION:
        message = f"response_id: no stream of the response {request_id[:MAX_ECHOED]!r} is kept (any more)"
        raise InvalidRequestError(message, param="response_id", code="stream_not_found", status=404)
    made = await requests.prepare(journal, client)
    if not made.body.background:
        raise InvalidRequestError("stream: only a response with background is streamed again", param="stream")
    journal.seen = seen
    deltas = followed(journal, made.model, [made.request], wait=True)
    return EventStream(numbered(journal, made.events_elsewhere(deltas)), closing=b"", error=made.error_event)


def _request_id(response_id: str) -> str:
    return response_id.removeprefix("resp_")


def _events_seen(request: Request, response_id: str) -> int:
    """The number of events that the client has, by `Last-Event-ID`, else by `starting_after`.

    Raises `InvalidRequestError`.
    """
    if last := request.headers.get(LAST_EVENT_ID_HEADER):
        known = EVENT_ID.fullmatch(last)
        if known is None or known[1] != _request_id(response_id):
            message = f"Last-Event-ID: {last[:MAX_ECHOED]!r} is no event of this response"
            raise InvalidRequestError(message, param="Last-Event-ID", code="stream_not_found", status=404)
        return int(known[2])
    sequence_number = request.query_params.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", sequence_number):
        raise InvalidRequestError("starting_after: must be a sequence_number", param="starting_after")
    return int(sequence_number) + 1


def _items_query(request: Request) -> ItemsQuery:
    """Raises `InvalidRequestError`. `include` has no effect: items are kept with all that they have."""
    given = {name: value for name, value in request.query_params.items() if name not in ("include", "include[]")}
    try:
        return ItemsQuery.model_validate(given)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


def _page(items: list[Json], query: ItemsQuery) -> Json:
    """Raises `InvalidRequestError` if no item has the id after which the page begins."""
    ordered = items if query.order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if query.after is not None and query.after not in ids:
        raise InvalidRequestError(f"after: no item has the id {query.after[:MAX_LISTED]!r}", param="after")
    start = 0 if query.after is None else ids.index(query.after) + 1
    page = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }


RESPONSE = object_of(
    id=TEXT,
    object=TEXT,
    created_at=NUMBER,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]},
    model=TEXT,
    output=list_of({"type": "object"}),
    usage={"type": ["object", "null"]},
    error={"type": ["object", "null"]},
    **LEFT_OUT,
)
OR_NULL: Json = {"type": ["string", "null"]}
DOCS = ApiDescription(
    routes={
        ("post", COLLECTION): ((ResponseBody,), "Response", "Answer, with tools, reasoning and stored conversations."),
        ("get", ONE): ((), "Response", "A response that is stored, or runs here or in the background."),
        ("delete", ONE): ((), "DeletedResponse", "Forget a stored response."),
        ("post", ONE + "/cancel"): ((), "Response", "End a response that runs here or in the background."),
        ("get", ONE + "/input_items"): ((), "InputItems", "The items that a stored response continued."),
    },
    schemas={
        "Response": RESPONSE,
        "DeletedResponse": object_of(id=TEXT, object=TEXT, deleted={"type": "boolean"}),
        "InputItems": object_of(
            object=TEXT,
            data=list_of({"type": "object"}),
            first_id=OR_NULL,
            last_id=OR_NULL,
            has_more={"type": "boolean"},
        ),
    },
    streams=(COLLECTION,),
    parameters={
        ("get", ONE): [
            {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
            for name, kind in (("stream", "boolean"), ("starting_after", "integer"))
        ],
        ("get", ONE + "/input_items"): [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in ItemsQuery.model_json_schema()["properties"].items()
        ],
    },
)
