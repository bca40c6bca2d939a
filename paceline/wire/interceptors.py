"""The one place where exceptions become gRPC status codes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Never, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from paceline.wire.link_errors import Congested, Draining, EngineDeadError, PeerIdentityError, WireError

log = logging.getLogger(__name__)

Statuses = Mapping[type[Exception], grpc.StatusCode]

STATUSES: Statuses = {
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Congested: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerIdentityError: grpc.StatusCode.PERMISSION_DENIED,
    EngineDeadError: grpc.StatusCode.ABORTED,
}

# An interceptor sees every method of a server, so requests and responses are of any type.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
RpcContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Parse: TypeAlias = Callable[[Any], Any]
"""Turns the bytes of a request, or an iterator over them, into messages."""

CallAdmission: TypeAlias = Callable[[grpc.HandlerCallDetails], None]
"""Called before a call's first message is read. Raises to refuse the call."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose servicer raises with the status of the exception, and its text as details.

    An exception without a status is a bug: it is logged with its traceback, and the client gets INTERNAL. Bytes that
    are no message of the method get INVALID_ARGUMENT. Methods are coroutines or async generators.
    """

    def __init__(self, statuses: Statuses, peer: str = "", admit: CallAdmission | None = None) -> None:
        """`statuses` adds to `STATUSES`; the status of a base class applies too.

        `peer`: the name that a client's certificate must have, "" for any. Neither `peer` nor `admit` applies to health
        and reflection.
        """
        self._statuses = {**STATUSES, **statuses}
        self._peer = peer
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> RpcHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        is_ours = handler_call_details.method.startswith("/paceline.")
        if is_ours and self._admit is not None:
            try:
                self._admit(handler_call_details)
            except Exception as error:  # noqa: BLE001 - becomes a status
                return self._refuse(error)
        parse = _message_parser(handler.request_deserializer)
        peer = self._peer if is_ours else ""
        # gRPC logs what a deserializer raises and gives the client no details, so methods get bytes and parse them.
        serializer = {"response_serializer": handler.response_serializer}
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._wrap(handler.unary_unary, parse, peer), **serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._wrap(handler.unary_stream, parse, peer), **serializer)
        if handler.stream_stream:
            method = self._wrap(handler.stream_stream, _stream_parser(parse), peer)
            return grpc.stream_stream_rpc_method_handler(method, **serializer)
        raise NotImplementedError(f"{handler_call_details.method}: no service here streams requests only")

    def _refuse(self, error: Exception) -> RpcHandler:
        """Return a handler for any kind of method: as a stream it does not read a request."""

        async def refuse(requests: object, context: RpcContext) -> None:
            await self._abort(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(self, method: Callable[..., Any], parse: Parse, peer: str) -> Callable[..., Any]:
        async def reply(request: Any, context: RpcContext) -> Any:
            try:
                _check_peer(context, peer)
                return await method(parse(request), context)
            except Exception as error:  # noqa: BLE001 - becomes a status
                await self._abort(error, context)

        async def stream(request: Any, context: RpcContext) -> AsyncGenerator[Any]:
            try:
                _check_peer(context, peer)
                async for response in method(parse(request), context):
                    yield response
            except Exception as error:  # noqa: BLE001 - becomes a status
                await self._abort(error, context)

        return reply if inspect.iscoroutinefunction(method) else stream

    async def _abort(self, error: Exception, context: RpcContext) -> Never:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        for base in type(error).__mro__:
            if status := self._statuses.get(base):
                await context.abort(status, str(error))
        log.error("a call failed", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def _check_peer(context: RpcContext, peer: str) -> None:
    names = context.auth_context().get("x509_subject_alternative_name", ()) if peer else ()
    if peer and peer.encode() not in names:
        raise PeerIdentityError(f"the caller's certificate does not name it {peer}")


def _message_parser(deserialize: Parse | None) -> Parse:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data) if deserialize is not None else data
        except DecodeError:
            raise WireError(f"{len(data)} bytes that are no message of this method") from None

    return parse


def _stream_parser(parse: Parse) -> Parse:
    async def parse_each(requests: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
        async for request in requests:
            yield parse(request)

    return parse_each
