"""What every HTTP answer has: a place in the counts, by route and status, and a name."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.telemetry.gateway_metrics import GatewayMetrics

CLIENT_CLOSED_REQUEST = 499
"""The status, in nginx's tradition, of a request whose client left before the answer."""

REQUEST_ID = "x-request-id"
_SOUND_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Middleware: the client's `x-request-id`, or a new one, is in the answer's headers and in the request's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[REQUEST_ID] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, named)


class HttpMetricsMiddleware:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500 if status == CLIENT_CLOSED_REQUEST else status  # Starlette sends it from outside of here
            raise
        finally:
            route = scope.get("route")  # a path that leads nowhere has none
            self._metrics.count_response(route.path if route else "none", status)
