"""The routes of OpenAI's completions and models, and of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import Response

from paceline_services.gateway.generation.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline_services.gateway.generation.chat_prompt import encode_body
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.deltas import Deltas, collect
from paceline_services.gateway.generation.http_request import begin_request, numbered, read_body
from paceline_services.gateway.generation.journal import Journals
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.prompt_encoding import decode, in_encoding_thread
from paceline_services.gateway.generation.request_builder import build_requests
from paceline_services.gateway.generation.request_trace import traced
from paceline_services.gateway.generation.resumption import resumable
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.http.event_stream import EventStream, ServerSentEvent, while_connected
from paceline_services.gateway.http.json_body import JsonResponse, parse_body
from paceline_services.gateway.openai.response import ChatCompletionResponse, CompletionResponse, OpenAIResponse


def add_openai_routes(app: FastAPI, models: ModelDirectory, journals: Journals) -> None:
    """Completions, chat completions, models, and tokens as vLLM has them."""
    _add_generation(app, models, journals, "/v1/completions", CompletionBody, CompletionResponse)
    _add_generation(app, models, journals, "/v1/chat/completions", ChatBody, ChatCompletionResponse)
    _add_models(app, models)
    _add_tokens(app, models)


def _add_generation(
    app: FastAPI,
    models: ModelDirectory,
    journals: Journals,
    path: str,
    body_type: type[GenerationBody],
    response_type: Callable[[Any, Sequence[CompletionRequest], ServedModel, int], OpenAIResponse],
) -> None:
    @app.post(path, name=path.removeprefix("/v1/").replace("/", "_"))
    async def generate(request: Request) -> Response:
        journal, client, span = await begin_request(request, models, journals, chat=body_type is ChatBody)
        body = parse_body(journal.body, body_type)
        model = models.model(body.model)
        requests = await build_requests(body, model, journal.id, client, journal.headers, span)
        response = response_type(body, requests, model, journal.created)
        output = resumable(journal, model, requests, client, streamed=response.streamed)
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


async def _chunks(response: OpenAIResponse, deltas: Deltas) -> AsyncGenerator[ServerSentEvent]:
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
        "sampling_defaults": model.sampling_defaults,
    }
