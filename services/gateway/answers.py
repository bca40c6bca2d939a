"""Counts every HTTP answer by route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.telemetry.gateway_metrics import GatewayMetrics

NO_ANSWER = 499
"""The status, in nginx's tradition, of a request whose client left before the answer."""


class CountAnswers:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = NO_ANSWER

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500 if status == NO_ANSWER else status  # Starlette sends it from outside of here
            raise
        finally:
            route = scope.get("route")  # a path that leads nowhere has none
            self._metrics.answered(route.path if route else "none", status)
