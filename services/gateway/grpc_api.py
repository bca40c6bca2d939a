"""`InferenceService`: the same core for gRPC clients. A request is checked as the HTTP body that it amounts to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from pydantic import ValidationError

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import inference_pb2_grpc
from paceline.wire.common import FINISH_REASONS, encode_stats, encode_timings
from paceline.wire.interceptors import Statuses
from paceline.wire.server import Server
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.choice import Choice, Piece
from services.gateway.errors import (
    ApiError,
    GenerationError,
    InvalidRequestError,
    NoTargetError,
    OverloadedError,
    UnknownModelError,
)
from services.gateway.gateway import Gateway
from services.gateway.plan import DEFAULT_COMPLETION_TOKENS, plan_chat, plan_completion

STATUSES: Statuses = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoTargetError: grpc.StatusCode.UNAVAILABLE,
    GenerationError: grpc.StatusCode.INTERNAL,
}

Context = grpc.aio.ServicerContext[Any, Any]


def create_server(host: str, port: int, gateway: Gateway) -> Server:
    """A server for the gateway, not started yet."""
    server = Server(host, port, STATUSES)
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Inference(gateway), service)
    return server


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[pb.GenerateResponse]:
        try:
            choice = await self._choice(request)
            completion_tokens = 0
            async with aclosing(self._gateway.generate(choice)) as pieces:
                async for piece in pieces:
                    completion_tokens += len(piece.tokens)
                    yield _response(piece, len(choice.prompt), completion_tokens)
        except ApiError as error:
            self._gateway.metrics.answered("Generate", STATUSES[type(error)].name)
            raise
        self._gateway.metrics.answered("Generate", grpc.StatusCode.OK.name)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        models = []
        if self._gateway.ready:
            served = self._gateway.served()
            models.append(pb.ListModelsResponse.Model(id=self._gateway.model, max_model_len=served.max_model_len))
        return pb.ListModelsResponse(models=models)

    async def _choice(self, request: pb.GenerateRequest) -> Choice:
        fields = _fields(request)
        try:
            match request.WhichOneof("prompt"):
                case "text":
                    body = CompletionBody.model_validate(fields | {"prompt": request.text})
                case "tokens":
                    body = CompletionBody.model_validate(fields | {"prompt": list(request.tokens.token_ids)})
                case "chat":
                    messages = [{"role": each.role, "content": each.content} for each in request.chat.messages]
                    chat = ChatBody.model_validate(fields | {"messages": messages})
                    return (await plan_chat(chat, self._gateway))[0]
                case _:
                    raise InvalidRequestError("one of text, tokens and chat must be set", param="prompt")
        except ValidationError as error:
            raise InvalidRequestError.of(error) from error
        return (await plan_completion(body, self._gateway))[0]


def _fields(request: pb.GenerateRequest) -> dict[str, Any]:
    """What the request says besides its prompt, as fields of an HTTP body."""
    sampling = request.sampling
    if sampling.HasField("logprobs"):
        raise InvalidRequestError("logprobs: not carried by this API; use HTTP", param="logprobs")
    fields: dict[str, Any] = {"max_tokens": DEFAULT_COMPLETION_TOKENS}
    for descriptor, value in sampling.ListFields():
        fields[descriptor.name] = value
    fields["logit_bias"] = dict(sampling.logit_bias)
    fields["stop_token_ids"] = list(sampling.stop_token_ids)
    speculative = {descriptor.name: value for descriptor, value in request.speculative.ListFields()}
    fields["speculation_stats"] = speculative.pop("report", False)
    return fields | {
        "model": request.model or None,
        "stop": list(request.stop) or None,
        "speculative": speculative or None,
    }


def _response(piece: Piece, prompt_tokens: int, completion_tokens: int) -> pb.GenerateResponse:
    response = pb.GenerateResponse(text=piece.text, token_ids=piece.tokens)
    if piece.finish_reason is not None:
        response.finish_reason = FINISH_REASONS[piece.finish_reason]
        response.prompt_tokens = prompt_tokens
        response.completion_tokens = completion_tokens
        response.timings.CopyFrom(encode_timings(piece.timings))
        if piece.speculation is not None:
            response.speculation.CopyFrom(encode_stats(piece.speculation))
    return response
