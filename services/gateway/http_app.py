"""The HTTP application: all APIs, the pages, the operators' routes, and errors as responses."""

from __future__ import annotations

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match

import paceline
from paceline_services.gateway.anthropic.routes import add_messages_api
from paceline_services.gateway.api_docs import add_api_docs
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError
from paceline_services.gateway.auth import Authenticator
from paceline_services.gateway.http.auth_middleware import AuthMiddleware, error_response
from paceline_services.gateway.http.event_stream import ClientGoneError
from paceline_services.gateway.http.http_metrics import (
    CLIENT_CLOSED_REQUEST,
    REQUEST_ID_HEADER,
    HttpMetricsMiddleware,
)
from paceline_services.gateway.openai.routes import add_openai_routes
from paceline_services.gateway.pages.fleet_report import FleetReport
from paceline_services.gateway.pages.operations import add_demo, add_operations
from paceline_services.gateway.pages.static_files import add_pages, page_paths
from paceline_services.gateway.responses.background import BackgroundResponses
from paceline_services.gateway.responses.generation import ResponseRequests
from paceline_services.gateway.responses.routes import add_responses
from paceline_services.gateway.settings import GatewaySettings


def create_app(
    registry: CollectorRegistry,
    authenticator: Authenticator,
    report: FleetReport,
    responses: ResponseRequests,
    background: BackgroundResponses,
    settings: GatewaySettings,
) -> FastAPI:
    """The application. `/metrics` shows what `registry` holds, `/operator` what `report` says."""
    models, journals, origins = responses.models, responses.journals, settings.allow_origin
    app = FastAPI(title="Paceline", version=paceline.__version__, docs_url=None, redoc_url=None)
    app.state.ping_s = settings.ping_s
    app.add_middleware(AuthMiddleware, authenticator, models.count_rejection, page_paths(), origins)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_middleware(HttpMetricsMiddleware, models.first.metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    add_openai_routes(app, models, journals)
    add_operations(app, models, registry, report, settings.public)
    if settings.demo_socket is not None:
        add_demo(app, settings.demo_socket)
    add_pages(app, {"requires_key": authenticator.requires_key, "demo": settings.demo_socket is not None})
    add_api_docs(app)
    add_messages_api(app, models, journals)
    add_responses(app, responses, background)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods. Starlette's own `Allow` has the methods of one route, a path may have several."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = {"allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
    invalid = InvalidRequestError(message, status=error.status_code, headers=headers)
    return error_response(invalid, request.scope)


def _methods(request: Request) -> list[str]:
    """All methods of the request's path."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    headers = {REQUEST_ID_HEADER: request.scope["state"][REQUEST_ID_HEADER]}
    return error_response(ApiError("the gateway failed; its log says how", headers=headers), request.scope)
