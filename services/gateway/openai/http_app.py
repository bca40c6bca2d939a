"""The HTTP API: OpenAI's routes, and vLLM's `/tokenize` and `/detokenize`. A route decodes, asks, encodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import paceline
from paceline_services.gateway.api_errors import (
    ApiError,
    BodyTooLargeError,
    InvalidRequestError,
    OverloadedError,
    SlowBodyError,
)
from paceline_services.gateway.auth import Authenticator
from paceline_services.gateway.generation import GenerationRequest, OutputChunk
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.api_docs import add_api_docs
from paceline_services.gateway.openai.auth_middleware import AuthMiddleware, client_of
from paceline_services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline_services.gateway.openai.event_stream import ClientGoneError, EventStream, encode_json, while_connected
from paceline_services.gateway.openai.http_metrics import REQUEST_ID, HttpMetricsMiddleware, RequestIdMiddleware
from paceline_services.gateway.openai.openai_response import ChatCompletionResponse, CompletionResponse, OpenAIResponse
from paceline_services.gateway.openai.prompt_encoding import check_ids, encode, encode_chat, in_encoding_thread
from paceline_services.gateway.openai.request_builder import build_chat_requests, build_completion_requests
from paceline_services.gateway.served_model import ServedModel, generate_all

AnyBody = TypeVar("AnyBody", bound=BaseModel)

SESSION_HEADER = "x-session-id"
"""Keeps a conversation at the target that knows it."""

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; the number is for logs."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()


def create_app(
    models: ModelDirectory, registry: CollectorRegistry, callers: Authenticator, origins: Sequence[str] = ()
) -> FastAPI:
    """The application. `/metrics` shows what `registry` holds. `origins`: sites whose pages may use it."""
    app = FastAPI(title="Paceline", version=paceline.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(AuthMiddleware, models, callers, origins)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_middleware(HttpMetricsMiddleware, models.first.metrics)
    app.add_middleware(RequestIdMiddleware)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    _add_generation(app, models)
    _add_models(app, models)
    _add_tokens(app, models)
    _add_operations(app, models, registry)
    add_api_docs(app)
    return app


def _add_generation(app: FastAPI, models: ModelDirectory) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        models.check_capacity()
        body = _parsed(await _read_body(request, models), CompletionBody)
        gateway = models.model(body.model)
        choices = _with_session(request, await build_completion_requests(body, gateway, client_of(request)))
        return await _respond(request, CompletionResponse(body, choices, gateway), choices, gateway)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        models.check_capacity()
        body = _parsed(await _read_body(request, models), ChatBody)
        gateway = models.model(body.model)
        choices = _with_session(request, await build_chat_requests(body, gateway, client_of(request)))
        return await _respond(request, ChatCompletionResponse(body, choices, gateway), choices, gateway)


def _add_models(app: FastAPI, models: ModelDirectory) -> None:
    @app.get("/v1/models")
    async def listed() -> Response:
        return JsonResponse({"object": "list", "data": [_model_card(gateway) for gateway in models]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return JsonResponse(_model_card(models.model(model)))


def _add_tokens(app: FastAPI, models: ModelDirectory) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = _tokenize_body(await _read_body(request, models))
        gateway = models.model(body.model)
        tokenizer = gateway.tokenizer
        with gateway.counting_rejections():
            if isinstance(body, TokenizeChatBody):
                tokens = await encode_chat(body, tokenizer)
            else:
                tokens = await encode(body.prompt, tokenizer, add_special_tokens=body.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": gateway.max_model_len, "tokens": tokens}
        shown = tokens if body.return_token_strs else []
        strings = await in_encoding_thread(len(shown), lambda: list(map(tokenizer.token_string, shown)))
        return JsonResponse(answer | {"token_strs": strings if body.return_token_strs else None})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = _parsed(await _read_body(request, models), DetokenizeBody)
        gateway = models.model(body.model)
        check_ids("tokens", body.tokens, gateway.vocabulary_size)
        decoded = in_encoding_thread(
            len(body.tokens), lambda: gateway.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return JsonResponse({"prompt": await decoded})


def _add_operations(app: FastAPI, models: ModelDirectory, registry: CollectorRegistry) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 only while requests would be served."""
        models.check_available()
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": paceline.__version__})


async def _respond(
    request: Request, reply: OpenAIResponse, choices: Sequence[GenerationRequest], gateway: ServedModel
) -> Response:
    if reply.is_stream:
        return EventStream(_chunks(reply, choices, gateway))
    pieces = await while_connected(request.receive, _collect(choices, gateway))
    return JsonResponse(reply.response(pieces))


async def _chunks(
    reply: OpenAIResponse, choices: Sequence[GenerationRequest], gateway: ServedModel
) -> AsyncGenerator[dict[str, Any]]:
    opening = reply.opening_chunks()
    async with aclosing(generate_all(gateway, choices)) as pieces:
        async for index, piece in pieces:
            for chunk in opening:
                yield chunk
            opening = []
            for chunk in reply.chunks(index, piece):
                yield chunk


async def _collect(choices: Sequence[GenerationRequest], gateway: ServedModel) -> list[list[OutputChunk]]:
    collected: list[list[OutputChunk]] = [[] for _ in choices]
    async with aclosing(generate_all(gateway, choices)) as pieces:
        async for index, piece in pieces:
            collected[index].append(piece)
    return collected


async def _read_body(request: Request, models: ModelDirectory) -> bytes:
    """The body, as far as the limits allow.

    Raises `BodyTooLargeError`, `SlowBodyError`, `OverloadedError` or `ClientGoneError`.
    """
    room, limits = models.capacity, models.capacity.limits
    body = bytearray()
    try:
        async with asyncio.timeout(limits.max_body_s):
            async for part in request.stream():
                body += part
                room.bytes_reading += len(part)
                if len(body) > limits.max_body_bytes:
                    raise BodyTooLargeError(limits.max_body_bytes)
                room.check_body(len(body))
    except TimeoutError:
        raise SlowBodyError(limits.max_body_s) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    except OverloadedError as error:
        models.count_rejection(error)
        raise
    finally:
        room.bytes_reading -= len(body)
    return bytes(body)


def _parsed(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


def _with_session(request: Request, choices: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """The header names the conversation in place of the body's `prompt_cache_key`."""
    session = request.headers.get(SESSION_HEADER)
    return [replace(choice, session=session) for choice in choices] if session else choices


def _tokenize_body(raw: bytes) -> TokenizeTextBody | TokenizeChatBody:
    try:
        content = from_json(raw)
    except ValueError:
        content = None  # reading it again, below, says what is wrong
    if isinstance(content, dict) and "messages" in content:
        return _parsed(raw, TokenizeChatBody)
    return _parsed(raw, TokenizeTextBody)


def _model_card(gateway: ServedModel) -> dict[str, Any]:
    return {
        "id": gateway.model,
        "object": "model",
        "created": gateway.created,
        "owned_by": "paceline",
        "max_model_len": gateway.max_model_len,
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JsonResponse(error.body, status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    told = InvalidRequestError(f"{request.method} {request.url.path}: {error.detail}")
    return JsonResponse(told.body, status_code=error.status_code, headers=error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    told = ApiError("the gateway failed; its log says how")
    return JsonResponse(told.body, told.status, {REQUEST_ID: request.scope["state"][REQUEST_ID]})
