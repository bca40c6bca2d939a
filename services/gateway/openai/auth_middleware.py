"""The door of the HTTP API: who has no key stays out, so do pages of other sites, and who is one too many waits."""

from __future__ import annotations

import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_services.gateway.api_errors import (
    ApiError,
    ForeignOriginError,
    InvalidRequestError,
    TooManyConnectionsError,
)
from paceline_services.gateway.auth import ApiClient, Authenticator
from paceline_services.gateway.model_directory import ModelDirectory
from paceline_services.gateway.openai.connection_limits import OVER_CONNECTION_LIMIT
from paceline_services.gateway.openai.event_stream import encode_json

log = logging.getLogger(__name__)

ANY_ORIGIN = "*"
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""For probes and Prometheus, which have no keys. vLLM leaves these open, too."""


class AuthMiddleware:
    """Middleware that finds out who calls, before anything of the body is read."""

    def __init__(
        self, app: ASGIApp, models: ModelDirectory, callers: Authenticator, origins: Collection[str] = ()
    ) -> None:
        """`origins`: of pages that may use this server although it is not theirs, such as `https://chat.example`."""
        self._app = app
        self._models = models
        self._authenticator = callers
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            check_framing(headers)
            self._check_connection_limit(scope)
            self._check_origin(scope, headers)
            caller = self._authenticator.client_for(headers.get("authorization"))
            with caller.admit():
                await self._forward(caller, scope, receive, send)
        except ApiError as error:  # ours: those of the application are answered by it
            await error_response(error)(scope, receive, send)

    def _check_connection_limit(self, scope: Scope) -> None:
        """Raises `TooManyConnectionsError` if it came over one connection too many."""
        if scope.get("state", {}).get(OVER_CONNECTION_LIMIT):
            error = TooManyConnectionsError()
            self._models.count_rejection(error)
            raise error

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A browser asks before it sends what a page of another site could not have sent by a form; a text is sent
        without asking. Raises `ForeignOriginError`."""
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS") or ANY_ORIGIN in self._origins:
            return
        if origin not in self._origins and urlsplit(origin).netloc != headers.get("host"):
            raise ForeignOriginError(origin)

    async def _forward(self, caller: ApiClient, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(caller.headers)
                log.debug("answer", extra={"key": caller.name, "path": scope["path"], "status": message["status"]})
            await send(message)

        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, told)


def check_framing(headers: Headers) -> None:
    """Raises `InvalidRequestError` for what a proxy before this server may have read in another way."""
    if len(headers.getlist("host")) > 1:
        raise InvalidRequestError("more than one Host header")
    if any(coding.strip().lower() != "chunked" for coding in headers.getlist("transfer-encoding")):
        raise InvalidRequestError("Transfer-Encoding: only chunked is known here")


def client_of(request: Request) -> ApiClient:
    """Whom the entrance let in."""
    caller: ApiClient = request.state.caller
    return caller


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    return Response(encode_json(error.body), error.status, error.headers, "application/json")
