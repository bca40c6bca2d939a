"""The routes below `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.http.auth_middleware import client_of
from paceline_services.gateway.http.event_stream import EventStream, while_connected
from paceline_services.gateway.http.http_body import JsonResponse, parse_body
from paceline_services.gateway.http.http_metrics import SPAN
from paceline_services.gateway.http.resumption import numbered, open_journal
from paceline_services.gateway.journal import Journals
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.api_docs import NUMBER, TEXT, ApiDescription, describe, list_of, object_of
from paceline_services.gateway.request_trace import start_request_span, traced
from paceline_services.gateway.responses.response_body import ResponseBody
from paceline_services.gateway.responses.response_generation import ResponseGeneration, build_response_request
from paceline_services.gateway.responses.response_history import ResponseHistory
from paceline_services.gateway.responses.running_response import RunningResponse

Json = dict[str, Any]

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


def add_responses(app: FastAPI, models: ModelDirectory, history: ResponseHistory, journals: Journals) -> None:
    """Add the routes, and their description."""
    running: dict[tuple[str, str], RunningResponse] = {}
    _add_creation(app, models, history, journals, running)
    _add_stored_responses(app, models, history, running)
    describe(app, DOCS)


def _add_creation(
    app: FastAPI,
    models: ModelDirectory,
    history: ResponseHistory,
    journals: Journals,
    running: dict[tuple[str, str], RunningResponse],
) -> None:
    @app.post(COLLECTION, name="responses")
    async def create(request: Request) -> Response:
        models.check_capacity()
        state = request.scope["state"]
        span = state[SPAN] = start_request_span(models.first.tracing, request.headers, chat=True)
        journal = await open_journal(request, models, journals)
        body = parse_body(journal.body, ResponseBody)
        model, client = models.model(body.model), client_of(request)
        items = [*await history.conversation(client.name, body.previous_response_id), *body.input]
        chat, generation = await build_response_request(body, items, model, journal.id, client, journal.headers, span)
        kept = body.to_be_kept and history.keeps
        response = RunningResponse(body, chat, generation, model, journal.created, lambda: journal.now, kept=kept)
        output = journal.deltas(model, [generation], client, streamed=bool(body.stream))
        deltas = traced(span, model.model, [generation], output, streamed=bool(body.stream))
        made = ResponseGeneration(response, deltas, client, items, history, running)
        if body.stream:
            return EventStream(numbered(journal, made.events()), closing=b"", error=made.error_event)
        return JsonResponse(await while_connected(request.receive, made.whole()))


def _add_stored_responses(
    app: FastAPI, models: ModelDirectory, history: ResponseHistory, running: dict[tuple[str, str], RunningResponse]
) -> None:
    @app.get(ONE)
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError("stream: a response that exists is not streamed again", param="stream")
        client = client_of(request).name
        if (response := running.get((client, response_id))) is not None:
            return JsonResponse(response.as_json())
        return JsonResponse((await history.load(client, response_id)).response)

    @app.delete(ONE)
    async def delete(request: Request, response_id: str) -> Response:
        await history.delete(client_of(request).name, response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post(ONE + "/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Ends a response that runs at this gateway. Its own request is answered with what was generated, too."""
        client = client_of(request).name
        response = running.get((client, response_id))
        if response is not None and models.abort(client, response_id):
            return JsonResponse(response.as_json("cancelled"))
        stored = (await history.load(client, response_id)).response
        if stored["status"] != "cancelled":
            message = f"response_id: the response has ended ({stored['status']}): it cannot be cancelled"
            raise InvalidRequestError(message, param="response_id")
        return JsonResponse(stored)

    @app.get(ONE + "/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query = _items_query(request)
        items = (await history.load(client_of(request).name, response_id)).items
        return JsonResponse(_page(items, query))


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
    status={"enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
    model=TEXT,
    output=list_of({"type": "object"}),
    usage={"type": ["object", "null"]},
    error={"type": ["object", "null"]},
)
OR_NULL: Json = {"type": ["string", "null"]}
DOCS = ApiDescription(
    routes={
        ("post", COLLECTION): ((ResponseBody,), "Response", "Answer, with tools, reasoning and stored conversations."),
        ("get", ONE): ((), "Response", "A response that runs here, or is stored."),
        ("delete", ONE): ((), "DeletedResponse", "Forget a stored response."),
        ("post", ONE + "/cancel"): ((), "Response", "End a response that runs at this gateway."),
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
        ("get", ONE): [{"name": "stream", "in": "query", "required": False, "schema": {"type": "boolean"}}],
        ("get", ONE + "/input_items"): [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in ItemsQuery.model_json_schema()["properties"].items()
        ],
    },
)
