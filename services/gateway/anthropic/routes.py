"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from paceline_services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from paceline_services.gateway.anthropic.conversion import FIELDS, chat_body
from paceline_services.gateway.anthropic.response import MessageResponse, error_event
from paceline_services.gateway.api_docs import LEFT_OUT, NUMBER, ApiDescription, describe, list_of, object_of
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.chat_prompt import render_chat
from paceline_services.gateway.generation.deltas import collect
from paceline_services.gateway.generation.http_request import begin_request, numbered, read_body
from paceline_services.gateway.generation.journal import Journals
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.prompt_encoding import encode
from paceline_services.gateway.generation.request_builder import build_requests
from paceline_services.gateway.generation.request_trace import traced
from paceline_services.gateway.generation.resumption import resumable
from paceline_services.gateway.http.error_shape import MESSAGES_PATH
from paceline_services.gateway.http.event_stream import EventStream, ServerSentEvent, while_connected
from paceline_services.gateway.http.http_metrics import REQUEST_ID_HEADER
from paceline_services.gateway.http.json_body import TEXT, JsonResponse, parse_body

COUNT_TOKENS_PATH = MESSAGES_PATH + "/count_tokens"
NULLABLE_TEXT: dict[str, Any] = {"type": ["string", "null"]}
DESCRIPTION = ApiDescription(
    routes={
        ("post", MESSAGES_PATH): ((MessagesBody,), "Message", "Continue a conversation, as Anthropic's API."),
        ("post", COUNT_TOKENS_PATH): ((CountTokensBody,), "InputTokens", "The length of a conversation in tokens."),
    },
    schemas={
        "Message": object_of(
            id=TEXT,
            type=TEXT,
            role=TEXT,
            model=TEXT,
            content=list_of(object_of(type=TEXT)),
            stop_reason=TEXT,
            stop_sequence=NULLABLE_TEXT,
            **LEFT_OUT,
            usage=object_of(
                input_tokens=NUMBER,
                cache_creation_input_tokens=NUMBER,
                cache_read_input_tokens=NUMBER,
                output_tokens=NUMBER,
                output_tokens_details=object_of(thinking_tokens=NUMBER),
            ),
        ),
        "InputTokens": object_of(input_tokens=NUMBER),
        "MessagesError": object_of(type=TEXT, error=object_of(type=TEXT, message=TEXT), request_id=TEXT),
    },
    streams=(MESSAGES_PATH,),
    error="MessagesError",
)


PING = ServerSentEvent({"type": "ping"}, event="ping").encode()


def add_messages_api(app: FastAPI, models: ModelDirectory, journals: Journals) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens`, and describe them."""

    @app.post(MESSAGES_PATH)
    async def messages(request: Request) -> Response:
        journal, client, span = await begin_request(request, models, journals, chat=True)
        body = parse_body(journal.body, MessagesBody)
        model = models.model(body.model)
        with _errors_named_as_here():
            chat = chat_body(body)
            requests = await build_requests(chat, model, journal.id, client, journal.headers, span)
        response = MessageResponse(body, chat, requests[0], model)
        output = resumable(journal, model, requests, client, streamed=bool(body.stream))
        deltas = traced(span, model.model, requests, output, streamed=bool(body.stream))
        if body.stream:
            to_event = partial(error_event, request_id=request.scope["state"][REQUEST_ID_HEADER])
            return EventStream(numbered(journal, response.events(deltas)), closing=b"", error=to_event, ping=PING)
        [whole] = await while_connected(request.receive, collect(requests, deltas))
        return JsonResponse(response.message(whole))

    @app.post(COUNT_TOKENS_PATH)
    async def count_tokens(request: Request) -> Response:
        body = parse_body(await read_body(request, models), CountTokensBody)
        model = models.model(body.model)
        with _errors_named_as_here():
            chat = chat_body(body)
            text = render_chat(chat, model.tokenizer)
        with model.counting_rejections():
            tokens = await encode(text, model.tokenizer, add_special_tokens=chat.add_special_tokens)
        return JsonResponse({"input_tokens": len(tokens)})

    describe(app, DESCRIPTION)


@contextmanager
def _errors_named_as_here() -> Iterator[None]:
    """Let errors about the chat completion name the fields of this API."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.renamed(FIELDS) from error
