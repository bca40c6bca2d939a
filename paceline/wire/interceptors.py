"""The one place where exceptions become status codes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Never, TypeAlias

import grpc

from paceline.wire.errors import Congested, Draining, StrangerError, WireError

log = logging.getLogger(__name__)

Statuses = Mapping[type[Exception], grpc.StatusCode]

STATUSES: Statuses = {
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Congested: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StrangerError: grpc.StatusCode.PERMISSION_DENIED,
}

# Of any request and response: an interceptor sees every method of a server.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Admit: TypeAlias = Callable[[grpc.HandlerCallDetails], None]
"""Hears of a call before anything of its message is taken, and raises if that is not to be."""


def admit_all(call: grpc.HandlerCallDetails) -> None:
    """Whoever can connect."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose servicer raises with the status of that exception, its text as details.

    An exception that has no status is a bug: it is logged with its traceback, and the peer reads INTERNAL. Only
    our own methods are wrapped; they are coroutines, or async generators where they stream. A coroutine that streams
    writes by itself.
    """

    def __init__(self, statuses: Statuses, peer: str = "", admit: Admit = admit_all) -> None:
        """`statuses` is looked up by class, then by base class; it adds to `STATUSES`.

        `peer`: whom a caller's certificate must name; "": anybody. Health and reflection are for everybody.
        """
        self._statuses = {**STATUSES, **statuses}
        self._peer = peer
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/paceline."):
            return handler
        try:
            self._admit(handler_call_details)
        except Exception as error:  # noqa: BLE001 - as everywhere here
            return self._refusal(error)
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._reply(handler.unary_unary), **codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream), **codecs)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream), **codecs)
        raise NotImplementedError(f"{handler_call_details.method}: no service here streams requests only")

    def _refusal(self, error: Exception) -> Handler:
        """Of any method: as one that streams requests it receives none before it asks for one."""

        async def refuse(requests: Any, context: Context) -> None:
            await self._abort(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _reply(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def reply(request: Any, context: Context) -> Any:
            try:
                self._check_peer(context)
                return await method(request, context)
            except Exception as error:  # noqa: BLE001 - all of them end up in a status and, unforeseen, in the log
                await self._abort(error, context)

        return reply

    def _stream(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):
            return self._reply(method)

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any]:
            try:
                self._check_peer(context)
                async for response in method(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - as above
                await self._abort(error, context)

        return stream

    def _check_peer(self, context: Context) -> None:
        names = context.auth_context().get("x509_subject_alternative_name", ()) if self._peer else ()
        if self._peer and self._peer.encode() not in names:
            raise StrangerError(f"the caller's certificate does not name it {self._peer}")

    async def _abort(self, error: Exception, context: Context) -> Never:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        for base in type(error).__mro__:
            if status := self._statuses.get(base):
                await context.abort(status, str(error))
        log.error("a call failed", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
