"""`InferenceService`: generation for gRPC clients. A request is checked as the HTTP body that it corresponds to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from paceline.telemetry.tracing import TraceSpan
from paceline.tls import Certificates
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import inference_pb2_grpc
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.interceptors import Statuses
from paceline_services.gateway.api_errors import (
    ApiError,
    AuthenticationError,
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    RetryLaterError,
    UnavailableError,
    UnknownModelError,
)
from paceline_services.gateway.auth import ApiClient, Authenticator
from paceline_services.gateway.generation.chat_prompt import encode_body
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.prompt_encoding import decode
from paceline_services.gateway.generation.request_builder import build_requests
from paceline_services.gateway.generation.request_trace import recording_failure, start_request_span, traced
from paceline_services.gateway.grpc.bodies import generation_body, tokenize_body
from paceline_services.gateway.grpc.responses import GenerateResponses
from paceline_services.gateway.http.event_stream import ClientGoneError, send_within_timeout


class ClientNotReadingError(ClientGoneError):
    """The task `writing` runs until the client reads or leaves."""

    def __init__(self, writing: asyncio.Task[None]) -> None:
        super().__init__("the response was not read in time")
        self.writing = writing


STATUSES: Statuses = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    GenerationError: grpc.StatusCode.INTERNAL,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    RateLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClientNotReadingError: grpc.StatusCode.CANCELLED,
}

PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata: when a client may retry (gRFC A6)."""

LEFT_OUT = "left-out-keywords"
"""Initial metadata: the schema keywords to which the output is not kept, as `left_out_keywords` over HTTP."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]


def create_server(
    host: str, port: int, models: ModelDirectory, authenticator: Authenticator, tls: Certificates | None = None
) -> GrpcServer:
    """The gateway's gRPC server, not started."""
    inference = GatewayInferenceServicer(models, authenticator)
    receive_bytes = models.capacity.limits.max_body_bytes
    server = GrpcServer(host, port, STATUSES, tls=tls, receive_bytes=receive_bytes, admit=inference.check_key)
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference, service)
    return server


class GatewayInferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, models: ModelDirectory, authenticator: Authenticator) -> None:
        self._models = models
        self._metrics = models.first.metrics
        self._authenticator = authenticator

    def check_key(self, call: grpc.HandlerCallDetails) -> None:
        """Check the key before any message is read. Raises `AuthenticationError`."""
        try:
            self._authenticator.client_for(_metadata(call.invocation_metadata).get("authorization"))
        except AuthenticationError as error:
            if call.method.endswith("/Generate"):
                self._metrics.count_response("Generate", STATUSES[type(error)].name)
            raise

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes by itself, so that a client that does not read loses its request, as over HTTP."""
        try:
            with self._authenticated(context) as client:
                self._models.check_capacity()
                metadata = _metadata(context.invocation_metadata())
                with self._traced(request, metadata) as span:
                    model, body = self._models.model(request.model or None), generation_body(request)
                    requests = await build_requests(body, model, uuid.uuid4().hex, client, metadata, span)
                    if left_out := requests[0].left_out_keywords:
                        await context.send_initial_metadata([(LEFT_OUT, ", ".join(left_out))])
                    responses = GenerateResponses(body, requests, model)
                    output = model.generate_all(requests, client)
                    async with aclosing(traced(span, model.model, requests, output, streamed=True)) as deltas:
                        async for index, delta in deltas:
                            for response in responses.of(index, delta):
                                await _write(context, response)
        except (ApiError, ClientNotReadingError) as error:
            self._metrics.count_response("Generate", STATUSES[type(error)].name)
            if isinstance(error, ClientNotReadingError):
                await error.writing  # gRPC can send no status before it ends
            raise
        except asyncio.CancelledError:  # by the client, or after its deadline: gRPC does not say which
            self._metrics.count_response("Generate", grpc.StatusCode.CANCELLED.name)
            raise
        except Exception:
            self._metrics.count_response("Generate", grpc.StatusCode.INTERNAL.name)  # as `StatusInterceptor` sends
            raise
        self._metrics.count_response("Generate", grpc.StatusCode.OK.name)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        with self._authenticated(context):
            available = [model for model in self._models if not model.unavailable()]
            cards = [pb.ListModelsResponse.Model(id=each.model, max_model_len=each.max_model_len) for each in available]
            return pb.ListModelsResponse(models=cards)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        with self._authenticated(context):
            model = self._models.model(request.model or None)
            with model.counting_rejections():
                tokens = await encode_body(tokenize_body(request), model.tokenizer)
            return pb.TokenizeResponse(token_ids=tokens, max_model_len=model.max_model_len or 0)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        with self._authenticated(context):
            model = self._models.model(request.model or None)
            text = await decode(list(request.token_ids), model.tokenizer, model.vocabulary_size)
            return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        # Not counted as a request: a client at its limit could not abort.
        client = self._authenticator.client_for(_metadata(context.invocation_metadata()).get("authorization"))
        return pb.AbortResponse(aborted=self._models.abort(client.name, request.request_id))

    @contextmanager
    def _traced(self, request: pb.GenerateRequest, metadata: Mapping[str, str]) -> Iterator[TraceSpan]:
        """The span of a call, which ends with the context."""
        chat = request.WhichOneof("prompt") == "chat"
        span = start_request_span(self._models.first.tracing, metadata, chat=chat)
        try:
            with recording_failure(span):
                yield span
        finally:
            span.end()

    @contextmanager
    def _authenticated(self, context: Context) -> Iterator[ApiClient]:
        """Check the key again: the message may arrive much later than the call. Raises `ApiError`."""
        try:
            client = self._authenticator.client_for(_metadata(context.invocation_metadata()).get("authorization"))
            with client.admit():
                yield client
        except RetryLaterError as error:
            context.set_trailing_metadata([*error.headers.items(), (PUSHBACK, str(1000 * error.retry_after_s))])
            raise


def _metadata(metadata: Metadata | None) -> dict[str, str]:
    """What HTTP has in headers."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    """Raises `ClientNotReadingError` if the client reads nothing for long: gRPC cannot cancel a write."""
    writing = asyncio.create_task(context.write(response))
    try:
        await send_within_timeout(asyncio.shield(writing))
    except ClientGoneError:
        raise ClientNotReadingError(writing) from None
    except asyncio.CancelledError:
        writing.cancel()
        raise
