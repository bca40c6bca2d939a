"""The HTTP API: OpenAI's completions and models, vLLM's `/tokenize` and `/detokenize`, and the operators' routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import paceline
from paceline.core.messages import Delta, GenerationRequest
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError
from paceline_services.gateway.auth import Authenticator
from paceline_services.gateway.journal import Journals
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.api_docs import add_api_docs
from paceline_services.gateway.openai.auth_middleware import AuthMiddleware, client_of, error_response
from paceline_services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline_services.gateway.openai.chat_prompt import encode_body
from paceline_services.gateway.openai.event_stream import ClientGoneError, EventStream, while_connected
from paceline_services.gateway.openai.http_body import JsonResponse, collect, parse_body, read_body
from paceline_services.gateway.openai.http_metrics import (
    CLIENT_CLOSED_REQUEST,
    REQUEST_ID_HEADER,
    SPAN,
    HttpMetricsMiddleware,
)
from paceline_services.gateway.openai.openai_response import ChatCompletionResponse, CompletionResponse, OpenAIResponse
from paceline_services.gateway.openai.operations import add_operations
from paceline_services.gateway.openai.prompt_encoding import decode, in_encoding_thread
from paceline_services.gateway.openai.request_builder import build_requests
from paceline_services.gateway.openai.request_trace import start_request_span, traced
from paceline_services.gateway.openai.resumption import numbered, open_journal
from paceline_services.gateway.openai.server_sent_event import ServerSentEvent
from paceline_services.gateway.pages.demo_route import add_demo
from paceline_services.gateway.pages.fleet_report import FleetReport
from paceline_services.gateway.pages.static_files import add_pages
from paceline_services.gateway.served_model import ServedModel


def create_app(
    models: ModelDirectory,
    registry: CollectorRegistry,
    authenticator: Authenticator,
    report: FleetReport,
    journals: Journals,
    origins: Sequence[str] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    demo_socket: Path | None = None,
) -> FastAPI:
    """The application. `/metrics` shows what `registry` holds, `/operator` what `report` says, `journals` has streams.

    `origins`: sites whose pages may use it. `options`: what `/server_info` shows. `demo_socket`: the launcher's, in
    demo mode.
    """
    app = FastAPI(title="Paceline", version=paceline.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(AuthMiddleware, models, authenticator, origins)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_middleware(HttpMetricsMiddleware, models.first.metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    _add_generation(app, models, journals, "/v1/completions", CompletionBody, CompletionResponse)
    _add_generation(app, models, journals, "/v1/chat/completions", ChatBody, ChatCompletionResponse)
    _add_models(app, models)
    _add_tokens(app, models)
    add_operations(app, models, registry, report, options)
    if demo_socket is not None:
        add_demo(app, demo_socket)
    add_pages(app, {"requires_key": authenticator.requires_key, "demo": demo_socket is not None})
    add_api_docs(app)
    return app


def _add_generation(
    app: FastAPI,
    models: ModelDirectory,
    journals: Journals,
    path: str,
    body_type: type[GenerationBody],
    response_type: Callable[[Any, Sequence[GenerationRequest], ServedModel, int], OpenAIResponse],
) -> None:
    @app.post(path, name=path.removeprefix("/v1/").replace("/", "_"))
    async def generate(request: Request) -> Response:
        models.check_capacity()
        state = request.scope["state"]
        span = state[SPAN] = start_request_span(models.first.tracing, request.headers, chat=body_type is ChatBody)
        journal = await open_journal(request, models, journals)
        body = parse_body(journal.body, body_type)
        model = models.model(body.model)
        client = client_of(request)
        requests = await build_requests(body, model, journal.id, client, journal.headers, span)
        response = response_type(body, requests, model, journal.created)
        output = journal.deltas(model, requests, client, streamed=response.streamed)
        deltas = traced(span, model.model, requests, output, streamed=response.streamed)
        if response.streamed:
            return EventStream(numbered(journal, _chunks(response, deltas)))
        outputs = await while_connected(request.receive, collect(requests, deltas))
        return JsonResponse(response.response(outputs))


def _add_models(app: FastAPI, models: ModelDirectory) -> None:
    @app.get("/v1/models")
    async def listed() -> Response:
        return JsonResponse({"object": "list", "data": [_model_card(each) for each in models]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return JsonResponse(_model_card(models.model(model)))


def _add_tokens(app: FastAPI, models: ModelDirectory) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = _tokenize_body(await read_body(request, models))
        model = models.model(body.model)
        tokenizer = model.tokenizer
        with model.counting_rejections():
            tokens = await encode_body(body, tokenizer)
        content = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}
        shown = tokens if body.return_token_strs else []
        strings = await in_encoding_thread(len(shown), lambda: list(map(tokenizer.token_string, shown)))
        return JsonResponse(content | {"token_strs": strings if body.return_token_strs else None})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(await read_body(request, models), DetokenizeBody)
        model = models.model(body.model)
        return JsonResponse({"prompt": await decode(body.tokens, model.tokenizer, model.vocabulary_size)})


async def _chunks(
    response: OpenAIResponse, deltas: AsyncGenerator[tuple[int, Delta]]
) -> AsyncGenerator[ServerSentEvent]:
    opening = response.opening_chunks()
    async with aclosing(deltas):
        async for index, delta in deltas:
            for chunk in opening:
                yield ServerSentEvent(chunk)
            opening = []
            for chunk in response.chunks(index, delta):
                yield ServerSentEvent(chunk)


def _tokenize_body(raw: bytes) -> TokenizeTextBody | TokenizeChatBody:
    try:
        content = from_json(raw)
    except ValueError:
        content = None  # `parse_body` raises the error
    if isinstance(content, dict) and "messages" in content:
        return parse_body(raw, TokenizeChatBody)
    return parse_body(raw, TokenizeTextBody)


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.model,
        "object": "model",
        "created": model.created,
        "owned_by": "paceline",
        "max_model_len": model.max_model_len,
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    invalid = InvalidRequestError(message, status=error.status_code, headers=error.headers)
    return error_response(invalid, request.scope)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    headers = {REQUEST_ID_HEADER: request.scope["state"][REQUEST_ID_HEADER]}
    return error_response(ApiError("the gateway failed; its log says how", headers=headers), request.scope)
