"""Streams of a real gateway, watched while they run and compared with the expected answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import httpx

from loadtests.chaos.chaos_cases import ChaosCase, opened
from loadtests.received_stream import ReceivedStream, same_answer
from paceline.state import WorkerRecord
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from paceline_services.gateway.server import Addresses, running
from paceline_services.gateway.settings import GatewaySettings
from tests.helpers.memory_state import open_state
from tests.helpers.targets import TargetWorker, target_worker
from tests.helpers.waiting import PATIENCE_S


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


def timed_target(model: str) -> AbstractAsyncContextManager[TargetWorker]:
    """A target in this process over a timed model."""
    return target_worker(model=TimedModel(model, TimedModelConfig.parse(model), 2**15, 4096))


@asynccontextmanager
async def gateway_for(model: str, *targets: str) -> AsyncIterator[Addresses]:
    """A gateway in this process, and the addresses of its targets, which compute this timed model."""
    fingerprint = TimedModelConfig.parse(model).fingerprint
    async with open_state(ttl_s=3600.0) as store:
        for number, address in enumerate(targets):
            record = WorkerRecord("target", f"{number}", address, "tested", "", fingerprint, time.time())
            await store.registry.register(record)
        async with running(GatewaySettings({"tested": model}, port=0, drain_s=1.0), store) as (models, addresses):
            assert await models.first.fleet.wait_for_target(PATIENCE_S)
            yield addresses
