"""The HTTP API: OpenAI's routes, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
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
from paceline.core.messages import Delta, GenerationRequest
from paceline_services.gateway.api_errors import (
    CLOSE_CONNECTION,
    ApiError,
    InvalidRequestError,
    OverloadedError,
)
from paceline_services.gateway.auth import Authenticator
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
from paceline_services.gateway.openai.event_stream import ClientGoneError, EventStream, encode_json, while_connected
from paceline_services.gateway.openai.http_metrics import (
    CLIENT_CLOSED_REQUEST,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    HttpMetricsMiddleware,
)
from paceline_services.gateway.openai.openai_response import ChatCompletionResponse, CompletionResponse, OpenAIResponse
from paceline_services.gateway.openai.prompt_encoding import check_ids, encode, encode_chat, in_encoding_thread
from paceline_services.gateway.openai.request_builder import build_requests
from paceline_services.gateway.pages.demo_route import add_demo
from paceline_services.gateway.pages.fleet_report import FleetReport
from paceline_services.gateway.pages.static_files import add_pages
from paceline_services.gateway.served_model import ServedModel

AnyBody = TypeVar("AnyBody", bound=BaseModel)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()


def create_app(
    models: ModelDirectory,
    registry: CollectorRegistry,
    authenticator: Authenticator,
    report: FleetReport,
    origins: Sequence[str] = (),
    demo_socket: Path | None = None,
) -> FastAPI:
    """The application. `/metrics` shows what `registry` holds, `/operator` what `report` says.

    `origins`: sites whose pages may use it. `demo_socket`: the launcher's, in demo mode.
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
    _add_generation(app, models, "/v1/completions", "completions", CompletionBody, CompletionResponse)
    _add_generation(app, models, "/v1/chat/completions", "chat_completions", ChatBody, ChatCompletionResponse)
    _add_models(app, models)
    _add_tokens(app, models)
    _add_operations(app, models, registry, report)
    if demo_socket is not None:
        add_demo(app, demo_socket)
    add_pages(app, {"requires_key": authenticator.requires_key, "demo": demo_socket is not None})
    add_api_docs(app)
    return app


def _add_generation(
    app: FastAPI,
    models: ModelDirectory,
    path: str,
    name: str,
    body_type: type[GenerationBody],
    response_type: Callable[[Any, Sequence[GenerationRequest], ServedModel], OpenAIResponse],
) -> None:
    @app.post(path, name=name)
    async def generate(request: Request) -> Response:
        models.check_capacity()
        body = _parsed(await _read_body(request, models), body_type)
        model = models.model(body.model)
        client = client_of(request)
        requests = await build_requests(body, model, request.scope["state"][REQUEST_ID], client, request.headers)
        response = response_type(body, requests, model)
        deltas = model.generate_all(requests, client)
        if response.streamed:
            return EventStream(_chunks(response, deltas))
        outputs = [Delta(each.request_id) for each in requests]
        await while_connected(request.receive, _collect(outputs, deltas))
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
        body = _tokenize_body(await _read_body(request, models))
        model = models.model(body.model)
        tokenizer = model.tokenizer
        with model.counting_rejections():
            if isinstance(body, TokenizeChatBody):
                tokens = await encode_chat(body, tokenizer)
            else:
                tokens = await encode(body.prompt, tokenizer, add_special_tokens=body.add_special_tokens)
        content = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}
        shown = tokens if body.return_token_strs else []
        strings = await in_encoding_thread(len(shown), lambda: list(map(tokenizer.token_string, shown)))
        return JsonResponse(content | {"token_strs": strings if body.return_token_strs else None})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = _parsed(await _read_body(request, models), DetokenizeBody)
        model = models.model(body.model)
        check_ids("tokens", body.tokens, model.vocabulary_size)
        decoded = in_encoding_thread(
            len(body.tokens), lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return JsonResponse({"prompt": await decoded})


def _add_operations(app: FastAPI, models: ModelDirectory, registry: CollectorRegistry, report: FleetReport) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 only while requests can be served."""
        models.check_available()
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/operator/state")
    async def operator_state() -> Response:
        return JsonResponse(await report.as_json())

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": paceline.__version__})


async def _chunks(
    response: OpenAIResponse, deltas: AsyncGenerator[tuple[int, Delta]]
) -> AsyncGenerator[dict[str, Any]]:
    opening = response.opening_chunks()
    async with aclosing(deltas):
        async for index, delta in deltas:
            for chunk in opening:
                yield chunk
            opening = []
            for chunk in response.chunks(index, delta):
                yield chunk


async def _collect(outputs: Sequence[Delta], deltas: AsyncGenerator[tuple[int, Delta]]) -> None:
    """Append the deltas of each completion to its output."""
    async with aclosing(deltas):
        async for index, delta in deltas:
            outputs[index].extend(delta)


async def _read_body(request: Request, models: ModelDirectory) -> bytes:
    """Read the body within the limits. Raises `InvalidRequestError`, `OverloadedError` or `ClientGoneError`."""
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


def _parsed(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


def _tokenize_body(raw: bytes) -> TokenizeTextBody | TokenizeChatBody:
    try:
        content = from_json(raw)
    except ValueError:
        content = None  # `_parsed` raises the error
    if isinstance(content, dict) and "messages" in content:
        return _parsed(raw, TokenizeChatBody)
    return _parsed(raw, TokenizeTextBody)


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
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(InvalidRequestError(message, status=error.status_code, headers=error.headers))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    headers = {REQUEST_ID_HEADER: request.scope["state"][REQUEST_ID_HEADER]}
    return error_response(ApiError("the gateway failed; its log says how", headers=headers))
