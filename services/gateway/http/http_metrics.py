"""The outermost middleware: request ids, headers of every response, and counts by route and status."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.tracing import TraceSpan
from paceline_services.gateway.http.error_shape import MESSAGES_REQUEST_ID_HEADER, is_messages_path

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status, as nginx has it, of a request whose client left before the response."""

REQUEST_ID_HEADER = "x-request-id"
"""Clients may choose it; it is in the response's headers, and a client may repeat it."""
REQUEST_ID = "request_id"
"""In the request's state: our own id, unique, in the response's body and at the target."""
SPAN = "span"
"""In the request's state: its `TraceSpan`, if it asks for output. It ends here, after the response."""
CLIENT = "client"
"""In the request's state: the `ApiClient`, once its key is known."""
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")


class HttpMetricsMiddleware:
    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        chosen = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        shown = chosen if _VALID_ID.fullmatch(chosen) else request_id
        scope.setdefault("state", {}).update({REQUEST_ID: request_id, REQUEST_ID_HEADER: shown})
        status = CLIENT_CLOSED_REQUEST

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = shown
                if is_messages_path(scope["path"]):
                    headers[MESSAGES_REQUEST_ID_HEADER] = shown
                if client := scope["state"].get(CLIENT):
                    headers.update(client.headers)
                    fields = {"key": client.name, "path": scope["path"], "status": status}
                    log.debug("response", extra={**fields, "request": request_id, REQUEST_ID_HEADER: shown})
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except Exception:
            status = 500 if status == CLIENT_CLOSED_REQUEST else status  # Starlette sends it outside this middleware
            raise
        finally:
            route = scope.get("route")  # an unknown path has none
            path = route.path if route else "none"
            self._metrics.count_response(path, status)
            if span := scope["state"].get(SPAN):
                _end_span(span, path, status)


def _end_span(span: TraceSpan, route: str, status: int) -> None:
    """End the span of a request over HTTP, after its response."""
    span.set({"http.route": route, "http.response.status_code": status})
    if status >= 500:
        span.fail(str(status))
    span.end()
