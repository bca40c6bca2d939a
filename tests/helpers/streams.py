"""Streams of a real gateway, watched while they run and compared with the expected answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from loadtests.chaos.chaos_cases import ChaosCase, opened
from loadtests.received_stream import ReceivedStream, same_answer

PATIENCE_S = 120.0
"""Timeout of a test; only a failing test waits this long."""


@dataclass
class Stream:
    """One request under way at one gateway."""

    case: ChaosCase
    url: str
    got: ReceivedStream = field(default_factory=ReceivedStream)
    lost: bool = False
    """The connection broke."""

    async def run(self, http: httpx.AsyncClient) -> None:
        try:
            async with opened(http, self.url, self.case.body) as lines:
                async for line in lines:
                    self.got.feed(line)
        except httpx.TransportError:
            self.lost = True

    def check(self) -> None:
        """The stream ended, and equals the expected answer."""
        assert self.got.complete, f"{self.case.name} ended after {len(self.got.tokens)} tokens"
        same = same_answer(self.got, self.case.expected)
        assert same, f"{self.case.name}: {self.got} instead of {self.case.expected}"


@asynccontextmanager
async def streaming(http: httpx.AsyncClient, cases: Sequence[ChaosCase], *urls: str) -> AsyncIterator[list[Stream]]:
    """Start all requests at once, the gateways in turn. Leaving waits until all streams have ended."""
    streams = [Stream(case, urls[i % len(urls)]) for i, case in enumerate(cases)]
    async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(http))
        yield streams


@asynccontextmanager
async def unfinished(http: httpx.AsyncClient, cases: Sequence[ChaosCase], url: str) -> AsyncIterator[list[Stream]]:
    """Streams that are cancelled when the context ends."""
    streams = [Stream(case, url) for case in cases]
    running = [asyncio.create_task(stream.run(http)) for stream in streams]
    try:
        yield streams
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def came(streams: Sequence[Stream], tokens: int) -> None:
    """Wait until each stream has `tokens` tokens or has ended. More than half must still run then."""
    async with asyncio.timeout(PATIENCE_S):
        while any(len(s.got.tokens) < tokens and not (s.got.complete or s.lost) for s in streams):
            await asyncio.sleep(0.005)
    running = sum(not s.got.complete for s in streams)
    assert 2 * running > len(streams), f"{running} of {len(streams)} streams still run: too late for the test"


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        yield http
