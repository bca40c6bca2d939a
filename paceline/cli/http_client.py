"""A client of the HTTP API for commands and benchmarks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0
RESPONSE_OPTIONS = {"return_token_ids": True, "return_accepted": True, "speculation_stats": True}


class ApiRefusedError(Exception):
    """The server refused a request; the message is the server's."""


@dataclass(slots=True)
class HttpCompletion:
    """One completion. Token i covers the characters from `offsets[i]` on; `accepted[i]`: it was a draft token.

    `wall_s`: from sending the request to the end of the stream, where that was measured. `speculation` and `timings`
    are the target's statistics. `prompt_tokens`: 0 unless the request asks for usage.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    wall_s: float = 0.0
    prompt_tokens: int = 0
    speculation: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add one chunk of the stream."""
        for choice in chunk["choices"]:
            content = choice.get("delta", {}).get("content") if "delta" in choice else choice.get("text")
            self.text += content or ""
            self.tokens += choice.get("token_ids") or []
            self.accepted += choice.get("accepted") or []
            self.offsets += choice.get("text_offset") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.speculation = chunk.get("speculation") or self.speculation
        self.prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", self.prompt_tokens)
        self.timings = chunk.get("timings") or self.timings


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Made by `open_client`."""

    http: httpx.AsyncClient

    async def model(self) -> str:
        """The name of the first model served."""
        listed = await self.http.get("/v1/models")
        return str(listed.raise_for_status().json()["data"][0]["id"])

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        on_progress: Callable[[HttpCompletion], None] = lambda _: None,
    ) -> HttpCompletion:
        """Stream a completion, and call `on_progress` after each chunk. Raises `ApiRefusedError` or httpx's errors."""
        completion = HttpCompletion()
        async for line in self._lines(path, body):
            _read(completion, line)
            on_progress(completion)
        return completion

    async def collect(self, path: str, body: Mapping[str, Any]) -> HttpCompletion:
        """As `stream`, but parse at the end, so that the client takes little of the machine that it measures."""
        completion = HttpCompletion()
        began = time.perf_counter()
        lines = [line async for line in self._lines(path, body)]
        completion.wall_s = time.perf_counter() - began
        for line in lines:
            _read(completion, line)
        return completion

    async def _lines(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[str]:
        async with self.http.stream("POST", path, json={"stream": True, **RESPONSE_OPTIONS, **body}) as response:
            if not response.is_success:
                raise ApiRefusedError(_refusal(await response.aread()))
            async for line in response.aiter_lines():
                yield line


def _read(completion: HttpCompletion, line: str) -> None:
    """Add one line of an event stream."""
    if line.startswith("data: {"):
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise ApiRefusedError(chunk["error"]["message"])
        completion.take(chunk)


@asynccontextmanager
async def open_client(url: str) -> AsyncIterator[HttpClient]:
    """A client of the server at `url`, with or without /v1. It uses no proxy."""
    server = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=server, timeout=TIMEOUT_S, trust_env=False) as http:
        yield HttpClient(http)


def _refusal(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
