"""The files of the pages, served from memory.

Their headers let a browser load and run nothing but these files: no inline script, no inline style, no other site.
`require-trusted-types-for` makes the browser refuse every string as HTML, so model output can only become text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

import paceline

FOLDER = Path(__file__).parent / "static"
PAGES = {"/": "playground.html", "/operator": "operator.html"}
SETTINGS_PATH = "/pages/settings.json"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # a browser asks each time whether the file has changed
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """304 without the content if the browser has this version."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


@cache
def static_files() -> Mapping[str, StaticFile]:
    """The files by path: pages at their own, everything else below `/pages/`."""
    named = {name: path for path, name in PAGES.items()}
    return {named.get(file.name, f"/pages/{file.name}"): _read(file) for file in sorted(FOLDER.iterdir())}


def add_pages(app: FastAPI, settings: Mapping[str, object]) -> None:
    """Add the routes of the files, and of `settings`, which pages read first. All are open to clients without a key."""
    for path, file in static_files().items():
        app.add_api_route(path, _route(file), methods=["GET", "HEAD"], include_in_schema=False)

    @app.get(SETTINGS_PATH, include_in_schema=False)
    async def page_settings() -> Response:
        return JSONResponse({"version": paceline.__version__, **settings}, headers=dict(HEADERS))


@cache
def page_paths() -> frozenset[str]:
    """Every path that `add_pages` serves."""
    return frozenset((*static_files(), SETTINGS_PATH))


def _route(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return file.response(request)

    return serve


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, MEDIA_TYPES[path.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"')
