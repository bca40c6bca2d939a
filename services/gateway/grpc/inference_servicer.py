"""`InferenceService`: the same core for gRPC clients. A request is checked as the HTTP body that it amounts to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import grpc
from pydantic import ValidationError

from paceline.tls import Certificates
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import inference_pb2_grpc
from paceline.wire.common_codec import FINISH_REASONS, encode_stats, encode_timings
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.interceptors import Statuses
from paceline_services.gateway.api_errors import (
    ApiError,
    AuthenticationError,
    GenerationError,
    InvalidRequestError,
    NoTargetError,
    OverloadedError,
    RateLimitError,
    RetryLaterError,
    UnknownModelError,
)
from paceline_services.gateway.auth import ApiClient, Authenticator
from paceline_services.gateway.generation import GenerationRequest, OutputChunk
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.bodies import ChatBody, CompletionBody
from paceline_services.gateway.openai.event_stream import ClientGoneError, send_within_timeout
from paceline_services.gateway.openai.request_builder import (
    DEFAULT_COMPLETION_TOKENS,
    build_chat_requests,
    build_completion_requests,
)
from paceline_services.gateway.served_model import ServedModel, generate_all


class ClientNotReadingError(ClientGoneError):
    """`writing` goes on for as long as the client neither reads nor leaves."""

    def __init__(self, writing: asyncio.Task[None]) -> None:
        super().__init__("what was sent was not read in time")
        self.writing = writing


STATUSES: Statuses = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoTargetError: grpc.StatusCode.UNAVAILABLE,
    GenerationError: grpc.StatusCode.INTERNAL,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    RateLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClientNotReadingError: grpc.StatusCode.CANCELLED,
}

PUSHBACK = "grpc-retry-pushback-ms"
"""How gRPC clients that retry are told when (gRFC A6)."""
SESSION_KEY = "x-session-id"

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]


def create_server(
    host: str, port: int, models: ModelDirectory, callers: Authenticator, tls: Certificates | None = None
) -> GrpcServer:
    """A server for the gateway, not started yet."""
    inference = GatewayInferenceServicer(models, callers)
    receive_bytes = models.capacity.limits.max_body_bytes
    server = GrpcServer(host, port, STATUSES, tls=tls, receive_bytes=receive_bytes, admit=inference.check_key)
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference, service)
    return server


class GatewayInferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, models: ModelDirectory, callers: Authenticator) -> None:
        self._models = models
        self._metrics = models.first.metrics
        self._authenticator = callers

    def check_key(self, call: grpc.HandlerCallDetails) -> None:
        """Whoever has no key sends no message. Raises `AuthenticationError`."""
        try:
            self._authenticator.client_for(_authorization(call.invocation_metadata))
        except AuthenticationError as error:
            if call.method.endswith("/Generate"):
                self._metrics.count_response("Generate", STATUSES[type(error)].name)
            raise

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes by itself: who reads nothing for long loses the request, as over HTTP."""
        try:
            with self._authenticated(context) as caller:
                self._models.check_capacity()
                gateway = self._models.model(request.model or None)
                choice = replace(await _choice(request, gateway, caller), session=_session(context))
                completion_tokens = 0
                async with aclosing(generate_all(gateway, [choice])) as pieces:
                    async for _, piece in pieces:
                        completion_tokens += len(piece.tokens)
                        await _write(context, _response(piece, len(choice.prompt), completion_tokens))
        except (ApiError, ClientNotReadingError) as error:
            self._metrics.count_response("Generate", STATUSES[type(error)].name)
            if isinstance(error, ClientNotReadingError):
                await error.writing  # it is all that is left of the request, and no status can be sent before it
            raise
        except Exception:
            self._metrics.count_response("Generate", grpc.StatusCode.INTERNAL.name)  # as `StatusInterceptor` tells it
            raise
        self._metrics.count_response("Generate", grpc.StatusCode.OK.name)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        with self._authenticated(context):
            ready = [gateway for gateway in self._models if not gateway.unavailable()]
            listed = [pb.ListModelsResponse.Model(id=each.model, max_model_len=each.max_model_len) for each in ready]
            return pb.ListModelsResponse(models=listed)

    @contextmanager
    def _authenticated(self, context: Context) -> Iterator[ApiClient]:
        """Whoever has a key still, now that the message has come. Raises `ApiError`."""
        try:
            caller = self._authenticator.client_for(_authorization(context.invocation_metadata()))
            with caller.admit():
                yield caller
        except RetryLaterError as error:
            context.set_trailing_metadata([*error.headers.items(), (PUSHBACK, str(1000 * error.retry_after_s))])
            raise


def _authorization(metadata: Metadata | None) -> str | None:
    """In metadata what HTTP has in a header."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}.get("authorization")


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    """Raises `ClientNotReadingError` if the client reads nothing for long. gRPC cannot take back what is being
    written."""
    writing = asyncio.create_task(context.write(response))
    try:
        await send_within_timeout(asyncio.shield(writing))
    except ClientGoneError:
        raise ClientNotReadingError(writing) from None
    except asyncio.CancelledError:
        writing.cancel()
        raise


def _session(context: Context) -> str:
    """The conversation that the call names in its metadata, as HTTP does in a header."""
    values = [value for key, value in context.invocation_metadata() or () if key == SESSION_KEY]
    return str(values[-1]) if values else ""


async def _choice(request: pb.GenerateRequest, gateway: ServedModel, caller: ApiClient) -> GenerationRequest:
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
                return (await build_chat_requests(chat, gateway, caller))[0]
            case _:
                raise InvalidRequestError("one of text, tokens and chat must be set", param="prompt")
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    return (await build_completion_requests(body, gateway, caller))[0]


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
    structure = request.WhichOneof("structure")
    keys = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
    return fields | {
        "structured_outputs": {keys[structure]: getattr(request, structure)} if structure else None,
        "model": request.model or None,
        "stop": list(request.stop) or None,
        "speculative": speculative or None,
        "cache_salt": request.cache_salt if request.HasField("cache_salt") else None,
    }


def _response(piece: OutputChunk, prompt_tokens: int, completion_tokens: int) -> pb.GenerateResponse:
    response = pb.GenerateResponse(text=piece.text, token_ids=piece.tokens)
    if piece.finish_reason is not None:
        response.finish_reason = FINISH_REASONS[piece.finish_reason]
        response.prompt_tokens = prompt_tokens
        response.completion_tokens = completion_tokens
        response.timings.CopyFrom(encode_timings(piece.timings))
        if piece.speculation is not None:
            response.speculation.CopyFrom(encode_stats(piece.speculation))
    return response
