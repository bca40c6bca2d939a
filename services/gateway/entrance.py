"""The door of the HTTP API: who has no key stays out, and who is one too many waits."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.callers import Caller, Callers
from services.gateway.errors import ApiError, CrowdedError
from services.gateway.guard import CROWDED
from services.gateway.models import Models
from services.gateway.streaming import encode_json

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""For probes and Prometheus, which have no keys. vLLM leaves these open, too."""


class Entrance:
    """Middleware that finds out who calls, before anything of the body is read."""

    def __init__(self, app: ASGIApp, models: Models, callers: Callers) -> None:
        self._app = app
        self._models = models
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._check_crowd(scope)
            caller = self._callers.caller(Headers(scope=scope).get("authorization"))
            with caller.request():
                await self._let_in(caller, scope, receive, send)
        except ApiError as error:  # ours: those of the application are answered by it
            await refusal(error)(scope, receive, send)

    def _check_crowd(self, scope: Scope) -> None:
        """Raises `CrowdedError` if it came over one connection too many."""
        if scope.get("state", {}).get(CROWDED):
            error = CrowdedError()
            self._models.rejected(error)
            raise error

    async def _let_in(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(caller.headers)
                log.debug("answer", extra={"key": caller.name, "path": scope["path"], "status": message["status"]})
            await send(message)

        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, told)


def caller_of(request: Request) -> Caller:
    """Whom the entrance let in."""
    caller: Caller = request.state.caller
    return caller


def refusal(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    return Response(encode_json(error.body), error.status, error.headers, "application/json")
