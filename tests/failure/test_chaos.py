"""A whole deployment under load, whose processes are killed or terminated: no client loses a token.

Real processes under the real supervisor; timed models, so that faults hit requests in progress. The expected answers
are the target's own, plain and undisturbed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

import httpx
import pytest
import pytest_asyncio

from loadtests.chaos import chaos_run as chaos
from loadtests.chaos.chaos_cases import LAST, ChaosCase, ask
from loadtests.chaos.chaos_client import ChaosClient
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.chaos_run import ChaosOptions
from loadtests.chaos.chaos_stack import ChaosStack, running
from loadtests.chaos.faults import REDIS, Fault
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from tests.helpers.streams import came, client, streaming
from tests.helpers.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

TARGET = "timed:vocabulary=512,step_ms=20"
DRAFT = SpeculativeConfig(method="draft_model", model="timed:vocabulary=512,step_ms=2,agreement=0.8")
MUTANT = "tests.failure.off_by_one"
TOKENS = 120
FOR_LONG = {"max_tokens": 8000}
"""Longer than any test here waits."""
SECONDS_S = 20.0
"""For events that take seconds; a keepalive takes ten."""


@dataclass
class Scene:
    stack: ChaosStack
    http: httpx.AsyncClient
    known: list[ChaosCase]
    mutant: ChaosStack
    """The same stack, with the mutant gateway only."""

    def long(self, count: int) -> list[ChaosCase]:
        """Requests that would go on for minutes."""
        return [replace(case, body={**case.body, **FOR_LONG}) for case in self.known[:count]]

    @asynccontextmanager
    async def load(self, clients: int) -> AsyncIterator[ChaosReport]:
        """Clients that compare answers, one request after another, while the context lasts."""
        report, stop = ChaosReport(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(ChaosClient(self.stack, self.http, report, Random(number)).run(self.known, stop))
            try:
                yield report
            finally:
                stop.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    options = DeploymentOptions(TARGET, DRAFT, EngineConfig(threads=1), target_workers=2)
    lines: list[str] = []
    async with running(options, lines.append, 2, (MUTANT,)) as stack, client() as http:
        urls = dict(stack.urls)
        mutant = urls.pop("gateway-3")
        stack = replace(stack, urls=urls)
        known = await chaos.references(stack, http, TOKENS)
        yield Scene(stack, http, known, replace(stack, urls={"gateway-3": mutant}))


async def test_expected_answers_obey_grammar_and_bias(scene: Scene) -> None:
    """A case without an effect would test nothing. Token i reads as the number i."""
    by_name = {name: [case for case in scene.known if case.name.startswith(name)] for name in ("grammar", "barred")}
    assert all(map(len, by_name.values()))
    for case in by_name["grammar"]:
        assert [token for token in case.expected.tokens[1::2] if token > 9] == []
        assert len(case.expected.tokens) == TOKENS
    for case in by_name["barred"]:
        *tokens, last = case.expected.tokens
        assert not {LAST, 7, 11} & set(tokens)
        assert [*itertools.pairwise(tokens)].count((1, 2)) == 0
        assert (last, len(tokens), case.expected.finish_reason) == (LAST, TOKENS - 1, "stop")


async def test_a_killed_gateways_requests_are_cancelled_and_can_be_retried(scene: Scene) -> None:
    """The retry with the same seed, at the other gateway, gets the same tokens."""
    first, other = scene.stack.urls.values()
    async with streaming(scene.http, scene.long(4), first) as streams:
        await came(streams, 20)
        while not await scene.stack.requests():  # metrics are updated once a second
            await asyncio.sleep(0.05)
        scene.stack.inject(Fault(0.0, ("gateway-1",), "kill"))
    assert all(stream.lost for stream in streams)
    async with asyncio.timeout(SECONDS_S):
        await scene.stack.idle()
    for stream in streams:
        again = await ask(scene.http, other, {**stream.case.body, "max_tokens": TOKENS})
        assert again.tokens[:20] == stream.got.tokens[:20]
        assert again.tokens == stream.case.expected.tokens
    await scene.stack.wait_ready()


async def test_redis_is_killed_and_comes_back_empty(scene: Scene) -> None:
    stack = scene.stack
    async with scene.load(6) as report:
        pid = stack.redis.pid
        stack.send(REDIS, signal.SIGKILL)
        await until(lambda: stack.redis.pid not in (None, pid) and report.requests >= 6)
    await stack.wait_ready()
    assert report.clean
    assert (report.refused, report.retries) == (0, 0)


async def test_replayed_requests_keep_seed_grammar_and_token_counts(scene: Scene) -> None:
    """All targets are killed: new ones know neither the output nor its length.

    A gateway that replays with another seed shows that clients of the chaos test would notice. Greedy answers do not
    depend on the seed.
    """
    urls = scene.stack.urls.values()
    known = [case for case in scene.known if case.name.startswith(("grammar", "barred"))]
    sampled = [case for case in scene.known if case.body["temperature"] > 0]
    report = ChaosReport()
    mutant = ChaosClient(scene.mutant, scene.http, report, Random(0))
    # The first grammar of a process takes longer than the others, and other streams would end meanwhile.
    await asyncio.gather(*(ask(scene.http, url, known[0].body) for url in urls for _ in range(2)))
    async with (
        streaming(scene.http, known, *urls) as streams,
        asyncio.TaskGroup() as clients,
    ):
        for case in sampled:
            clients.create_task(mutant.request(case))
        await came(streams, 20)
        assert scene.stack.inject(Fault(0.0, tuple(scene.stack.deployment.targets), "kill")) == 2
    for stream in streams:
        stream.check()
    assert report.changed_outputs > 0
    assert not report.clean
    assert (report.errors, report.lost_tokens) == (0, 0)


@pytest.mark.slow
async def test_a_rolling_restart_of_everything(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM: a process finishes or hands over its requests, and exits with code 0.

    One replica of each kind at a time, the next ones when all are ready again.
    """
    stack = scene.stack
    await stack.wait_ready()
    turns = itertools.zip_longest(stack.deployment.targets, stack.deployment.drafts, stack.urls)
    async with scene.load(6) as report:
        for turn in turns:
            for name in filter(None, turn):
                stack.inject(Fault(0.0, (name,), "terminate"))
                await until(lambda name=name: f"{name} ended with exit code" in caplog.text)  # type: ignore[misc]
                assert f"{name} ended with exit code 0" in caplog.text
            await stack.wait_ready()
    assert report.clean
    assert report.requests >= 6


@pytest.mark.slow
async def test_chaos(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loadtests")
    report = await chaos.run(
        scene.stack, ChaosOptions(duration_s=6.0, every_s=0.8, clients=8, max_tokens=TOKENS, seed=11)
    )
    summary = report.summary()
    assert not any(summary[name] for name in ("errors", "changed_outputs", "lost_tokens", "unsettled")), summary
    assert summary["kills"] >= 3
    assert summary["requests"] >= 8
