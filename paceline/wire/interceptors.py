"""The one place where exceptions become status codes."""

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

# Of any request and response: an interceptor sees every method of a server.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
RpcContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

CallAdmission: TypeAlias = Callable[[grpc.HandlerCallDetails], None]
"""Hears of a call before anything of its message is taken, and raises if that is not to be."""


def admit_any_call(call: grpc.HandlerCallDetails) -> None:
    """Whoever can connect."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose servicer raises with the status of that exception, its text as details.

    An exception that has no status is a bug: it is logged with its traceback, and the peer reads INTERNAL. Bytes that
    are no message of the method's kind are INVALID_ARGUMENT, also for health and reflection. Methods are coroutines, or
    async generators where they stream. A coroutine that streams writes by itself.
    """

    def __init__(self, statuses: Statuses, peer: str = "", admit: CallAdmission = admit_any_call) -> None:
        """`statuses` is looked up by class, then by base class; it adds to `STATUSES`.

        `peer`: whom a caller's certificate must name; "": anybody. Health and reflection are for everybody.
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
        ours = handler_call_details.method.startswith("/paceline.")
        try:
            if ours:
                self._admit(handler_call_details)
        except Exception as error:  # noqa: BLE001 - as everywhere here
            return self._refusal(error)
        peer = self._peer if ours else ""
        codecs = {
            "request_deserializer": _parser(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._reply(handler.unary_unary, peer), **codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, peer), **codecs)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, peer), **codecs)
        raise NotImplementedError(f"{handler_call_details.method}: no service here streams requests only")

    def _refusal(self, error: Exception) -> RpcHandler:
        """Of any method: as one that streams requests it receives none before it asks for one."""

        async def refuse(requests: Any, context: RpcContext) -> None:
            await self._abort(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _reply(self, method: Callable[..., Awaitable[Any]], peer: str) -> Callable[..., Awaitable[Any]]:
        async def reply(request: Any, context: RpcContext) -> Any:
            try:
                _check_peer(context, peer)
                return await method(_parsed(request), context)
            except Exception as error:  # noqa: BLE001 - all of them end up in a status and, unforeseen, in the log
                await self._abort(error, context)

        return reply

    def _stream(self, method: Callable[..., Any], peer: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):
            return self._reply(method, peer)

        async def stream(request: Any, context: RpcContext) -> AsyncGenerator[Any]:
            try:
                _check_peer(context, peer)
                async for response in method(_parsed(request), context):
                    yield response
            except Exception as error:  # noqa: BLE001 - as above
                await self._abort(error, context)

        return stream

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


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC logs what a deserializer raises, and tells the peer nothing of use: so it returns what went wrong."""

    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return WireError(f"{len(data)} bytes that are no message of this method")

    return parse


def _parsed(request: Any) -> Any:
    """A message, or an iterator of messages, that could be parsed. Raises `WireError`, or the iterator does."""
    if isinstance(request, WireError):
        raise request
    return _parsed_stream(request) if hasattr(request, "__aiter__") else request


async def _parsed_stream(requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    async for request in requests:
        yield _parsed(request)
