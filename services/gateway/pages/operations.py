"""Routes for operators: probes, metrics, load, what is served, and the end of running requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import Field
from starlette.responses import JSONResponse, Response

import paceline
from paceline.launcher import KILL_DRAFT
from paceline_services.gateway.api_errors import MAX_ECHOED, InvalidRequestError, UnavailableError
from paceline_services.gateway.generation.http_request import read_body
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.http.auth_middleware import client_of
from paceline_services.gateway.http.json_body import Body, JsonResponse, parse_body
from paceline_services.gateway.pages.fleet_report import FleetReport

MAX_ABORTED = 1024
"""Most requests that one call ends."""
MAX_REQUEST_ID = 256
"""Characters of a request's id."""


class AbortBody(Body):
    """Names and meaning are vLLM's."""

    request_ids: list[Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID)]] = Field(
        min_length=1, max_length=MAX_ABORTED, description="by the header X-Request-Id, or by the id of the response"
    )


def add_operations(
    app: FastAPI,
    models: ModelDirectory,
    registry: CollectorRegistry,
    report: FleetReport,
    options: Mapping[str, Any],
) -> None:
    """`report`: what `/operator` shows. `options`: of the gateway, as `/server_info` shows them."""
    _add_probes(app, models, registry)

    @app.get("/load")
    async def load() -> Response:
        """`server_load` as vLLM has it, the number of waiting requests as SGLang names it."""
        waiting = sum(model.queue.waiting for model in models)
        return JsonResponse({"server_load": models.capacity.in_flight, "num_waiting_reqs": waiting})

    @app.get("/server_info")
    async def server_info() -> Response:
        served = [_model_info(model, models.aliases_of(model.model)) for model in models]
        return JsonResponse({"version": paceline.__version__, "models": served, "options": options})

    @app.get("/operator/state")
    async def operator_state() -> Response:
        return JsonResponse(await report.as_json())

    @app.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        """Ends requests of the same client; their responses have what was generated, and the finish reason abort."""
        body = parse_body(await read_body(request, models), AbortBody)
        client = client_of(request).name
        return JsonResponse({"aborted": [each for each in body.request_ids if models.abort(client, each)]})

    @app.get("/v1/requests/{request_id:path}")
    async def report_request(request: Request, request_id: str) -> Response:
        """What speculation did for a request of the same client, which runs or has ended lately."""
        known = await models.report(client_of(request).name, request_id)
        if known is None:
            message = f"request_id: no request {request_id[:MAX_ECHOED]!r} runs, or has ended lately"
            raise InvalidRequestError(message, param="request_id", code="request_not_found", status=404)
        return Response(known, media_type="application/json")


def _add_probes(app: FastAPI, models: ModelDirectory, registry: CollectorRegistry) -> None:
    @app.get("/live")
    @app.head("/live", include_in_schema=False)
    async def live() -> Response:
        """200 while the event loop runs."""
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    @app.get("/health")
    @app.head("/ready", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        """200 only while requests can be served."""
        models.check_available()
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": paceline.__version__})


def _model_info(model: ServedModel, aliases: list[str]) -> dict[str, Any]:
    tools, reasoning = model.output_format.tools, model.output_format.reasoning
    return {
        "id": model.model,
        "aliases": aliases,
        "max_model_len": model.max_model_len,
        "targets_up": model.fleet.targets_up,
        "vocabulary_fingerprint": model.tokenizer.fingerprint,
        "tool_call_parser": None if tools is None else tools.name,
        "reasoning_parser": None if reasoning is None else reasoning.name,
    }


KILL_PATH = "/demo/kill-draft"
TIMEOUT_S = 5.0


def add_demo(app: FastAPI, socket: Path) -> None:
    """Add the route. `socket`: the launcher's, which owns the workers."""

    @app.post(KILL_PATH, include_in_schema=False)
    async def kill() -> Response:
        return JSONResponse({"killed": await kill_draft(socket)})


async def kill_draft(socket: Path) -> str | None:
    """Let the launcher kill one draft worker, and return its id; None if no draft worker runs now.

    Raises `UnavailableError` if the launcher does not answer.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(KILL_DRAFT)
                return (await reader.readline()).decode().strip() or None
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"the launcher does not answer: {error}") from error
