"""Demo mode: a button on the playground that kills a draft worker. `paceline serve --demo-page` switches it on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from paceline.launcher import KILL_DRAFT
from paceline_services.gateway.api_errors import UnavailableError

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
