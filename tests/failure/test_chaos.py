"""A whole deployment under load, whose processes are killed, stopped or terminated: no client loses a token.

Real processes under the real supervisor; timed models, so that faults hit requests in progress. The expected answers
are the target's own, plain and undisturbed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from tests.helpers.streams import PATIENCE_S, came, client, streaming, unfinished

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

TARGET = "timed:vocabulary=512,step_ms=20"
DRAFT = SpeculativeConfig(method="draft_model", model="timed:vocabulary=512,step_ms=2,agreement=0.8")
MUTANT = "tests.helpers.off_by_one"
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
    options = DeploymentOptions(TARGET, DRAFT, EngineConfig(threads=1), target_workers=2, draft_workers=2)
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
        await _wait_for_requests(scene.stack.requests)
        scene.stack.inject(Fault(0.0, ("gateway-1",), "kill"))
    assert all(stream.lost for stream in streams)
    async with asyncio.timeout(SECONDS_S):
        await scene.stack.idle()
    for stream in streams:
        again = await ask(scene.http, other, {**stream.case.body, "max_tokens": TOKENS})
        assert again.tokens[:20] == stream.got.tokens[:20]
        assert again.tokens == stream.case.expected.tokens
    async with asyncio.timeout(PATIENCE_S):
        await scene.stack.wait_ready()


async def test_replayed_requests_keep_grammar_and_token_counts(scene: Scene) -> None:
    """All targets are killed: new ones know neither the output nor its length."""
    known = [case for case in scene.known if case.name.startswith(("grammar", "barred"))]
    async with streaming(scene.http, known, *scene.stack.urls.values()) as streams:
        await came(streams, 10)
        assert scene.stack.inject(Fault(0.0, tuple(scene.stack.deployment.targets), "kill")) == 2
    for stream in streams:
        stream.check()
    async with asyncio.timeout(PATIENCE_S):
        await scene.stack.wait_ready()


@pytest.mark.slow
async def test_stopped_processes_are_left_and_may_come_back(scene: Scene) -> None:
    """SIGSTOP, like a cut network, leaves connections open: only an unanswered ping shows it.

    A stopped gateway's requests are cancelled; when it continues, it replays them, and its clients see a pause.
    A stopped target's requests move. A stopped draft costs draft tokens only.
    """
    stack = scene.stack
    first, other = stack.urls.values()
    hung, alive = stack.deployment.targets
    many = scene.long(16)  # enough for both targets, whatever load the gateway knows
    async with unfinished(scene.http, many, first):
        for name in (hung, alive):
            await _wait_for_requests(partial(stack.busy, name))
        async with streaming(scene.http, scene.known[:6], first, other) as streams:
            await came(streams, 10)
            for name in ("gateway-1", hung, next(iter(stack.deployment.drafts))):
                stack.send(name, signal.SIGSTOP, "both")
            await _until(lambda: all(stream.got.complete for stream in streams if stream.url == other))
            async with asyncio.timeout(SECONDS_S):
                while await stack.busy(alive):
                    await asyncio.sleep(0.1)
            assert not all(stream.got.complete for stream in streams if stream.url == first)
            stack.resume()
            await _until(lambda: all(stream.got.complete for stream in streams))
    for stream in streams:
        stream.check()
    async with asyncio.timeout(PATIENCE_S):
        await stack.wait_ready()
        await stack.idle()


async def test_redis_is_killed_and_comes_back_empty(scene: Scene) -> None:
    stack = scene.stack
    async with scene.load(6) as report:
        for _ in range(2):
            before, pid = report.requests, stack.redis.pid
            stack.send(REDIS, signal.SIGKILL)
            await _until(lambda: stack.redis.pid not in (None, pid) and report.requests >= before + 6)  # noqa: B023
    async with asyncio.timeout(PATIENCE_S):
        await stack.wait_ready()
    assert report.clean
    assert (report.refused, report.retries) == (0, 0)


@pytest.mark.slow
async def test_a_rolling_restart_of_everything(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM: a process finishes or hands over its requests, and exits with code 0.

    One replica of each kind at a time, the next ones when all are ready again.
    """
    stack = scene.stack
    turns = list(zip(stack.deployment.targets, stack.deployment.drafts, stack.urls, strict=True))
    async with scene.load(6) as report:
        for turn in turns:
            for name in turn:
                stack.inject(Fault(0.0, (name,), "terminate"))
                await _until(lambda name=name: f"{name} ended with exit code" in caplog.text)  # type: ignore[misc]
                assert f"{name} ended with exit code 0" in caplog.text
            async with asyncio.timeout(PATIENCE_S):
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
    assert {name: summary[name] for name in ("errors", "changed_outputs", "lost_tokens", "unsettled")} == {
        "errors": 0,
        "changed_outputs": 0,
        "lost_tokens": 0,
        "unsettled": 0,
    }
    assert summary["kills"] >= 3
    assert summary["requests"] >= 8


async def test_a_replay_with_another_seed_is_seen(scene: Scene) -> None:
    """The mutant: without this test, chaos clients that compare nothing would pass.

    Greedy answers do not depend on the seed, and a request without a token is started anew: so only sampled requests,
    and repeated until one is in progress.
    """
    sampled = replace(scene, stack=scene.mutant, known=[case for case in scene.known if case.body["temperature"] > 0])
    async with sampled.load(8) as report, asyncio.timeout(PATIENCE_S):
        while not report.changed_outputs:
            await scene.stack.wait_ready()
            victim = next(iter(scene.stack.deployment.targets))
            if await scene.stack.busy(victim):
                scene.stack.inject(Fault(0.0, (victim,), "kill"))
            await asyncio.sleep(0.5)
    async with asyncio.timeout(PATIENCE_S):
        await scene.stack.wait_ready()
    assert not report.clean
    assert (report.errors, report.lost_tokens) == (0, 0)


async def _wait_for_requests(requests: Callable[[], Awaitable[float]]) -> None:
    """Wait until metrics show requests; they are updated once a second."""
    async with asyncio.timeout(SECONDS_S):
        while not await requests():
            await asyncio.sleep(0.05)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
