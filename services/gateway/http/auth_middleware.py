"""Middleware in front of the HTTP API: authentication, the origin of browser requests, the connection limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_services.gateway.api_errors import (
    MAX_ECHOED,
    ApiError,
    InvalidRequestError,
    RetryLaterError,
    UnavailableError,
)
from paceline_services.gateway.auth import ApiClient, Authenticator, authorization_of
from paceline_services.gateway.http.connection_limits import OVER_CONNECTION_LIMIT
from paceline_services.gateway.http.error_shape import error_body
from paceline_services.gateway.http.event_stream import LAST_EVENT_ID_HEADER
from paceline_services.gateway.http.http_metrics import CLIENT, REQUEST_ID_HEADER
from paceline_services.gateway.http.json_body import encode_json

ANY_ORIGIN = "*"
OPEN_PATHS = frozenset({"/health", "/live", "/metrics", "/ready", "/version"})
"""For probes and Prometheus, which have no keys. vLLM leaves these open, too. So are the files of the pages: a browser
asks for them before it has a key."""

ENDING_PATHS = re.compile(r"/abort_requests|/v1/responses/[^/]+/cancel")
"""Not counted as requests: otherwise a client at its limit could not end what it runs."""


class AuthMiddleware:
    """Finds the client of a request, before any of its body is read."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        count_rejection: Callable[[RetryLaterError], None],
        page_paths: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        """`page_paths`: open to clients without a key. `origins`: sites such as `https://chat.example` whose pages may
        use this server."""
        self._app = app
        self._authenticator = authenticator
        self._count_rejection = count_rejection
        self._page_paths = page_paths
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
            if scope["path"] in self._page_paths:
                await self._app(scope, receive, send)
                return
            client = self._authenticator.client_for(authorization_of(headers))
            scope.setdefault("state", {})[CLIENT] = client
            with _admitted(client, scope, headers):
                await self._app(scope, receive, send)
        except ApiError as error:  # raised here: the application answers its own
            await error_response(error, scope)(scope, receive, send)

    def _check_connection_limit(self, scope: Scope) -> None:
        """Raises `UnavailableError` if the connection exceeds the limit."""
        if scope.get("state", {}).get(OVER_CONNECTION_LIMIT):
            message = "too many connections are open; try again soon"
            error = UnavailableError(message, code="crowded", reason="connections")
            self._count_rejection(error)
            raise error

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Raises `InvalidRequestError` for a request that a page of another site sent.

        Browsers ask first before they send what a form cannot send, but they send plain text without asking.
        """
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS") or ANY_ORIGIN in self._origins:
            return
        if origin not in self._origins and urlsplit(origin).netloc != headers.get("host"):
            site = origin[:MAX_ECHOED]
            raise InvalidRequestError(
                f"pages of {site} may not use this server: start it with --allow-origin {site} if they may",
                status=403,
                code="foreign_origin",
            )


def _admitted(client: ApiClient, scope: Scope, headers: Headers) -> AbstractContextManager[None]:
    """Raises `RateLimitError`."""
    if ENDING_PATHS.fullmatch(scope["path"]):
        return nullcontext()
    generates = scope["method"] == "POST" or b"stream=true" in scope["query_string"]
    return client.admit(generates=generates, resumes=bool(headers.get(LAST_EVENT_ID_HEADER)))


def check_framing(headers: Headers) -> None:
    """Raises `InvalidRequestError` for headers that a proxy in front of this server may read differently."""
    if len(headers.getlist("host")) > 1:
        raise InvalidRequestError("more than one Host header")
    if any(coding.strip().lower() != "chunked" for coding in headers.getlist("transfer-encoding")):
        raise InvalidRequestError("Transfer-Encoding: only chunked is known here")


def client_of(request: Request) -> ApiClient:
    """The client that `AuthMiddleware` found."""
    client: ApiClient = request.scope["state"][CLIENT]
    return client


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in the shape of the API that the request is for."""
    body = error_body(error, scope["path"], scope["state"][REQUEST_ID_HEADER])
    return Response(encode_json(body), error.status, error.headers, "application/json")
