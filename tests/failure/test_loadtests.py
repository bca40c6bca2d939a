"""The load test's users against a gateway and a target over a timed model: no error, every token.

Lost and changed tokens, broken and hanging streams must be seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from loadtests.load_figures import LatencyGoal
from loadtests.load_profiles import LoadProfile, LoadRun
from loadtests.load_requests import RecordedQuestions, TimedQuestions
from loadtests.locust_process import run_locust
from paceline.cli.deployment import DeploymentOptions
from paceline.core.messages import Delta, EngineLoad
from paceline.state import WorkerRecord, open_store
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from paceline_services.gateway.server import Addresses, GatewaySettings, running
from tests.helpers.proxies import proxy
from tests.helpers.targets import TargetWorker, target_worker
from tests.helpers.workers import PATIENCE_S

pytestmark = pytest.mark.alone

MODEL = "timed:vocabulary=64,step_ms=10"
SLOTS = 2**15
ALL_KINDS = 27
"""With this many users, their weights give one of each kind."""


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Addresses, TargetWorker]]:
    spec = TimedModelConfig.parse(MODEL)
    settings = GatewaySettings({"tested": MODEL}, port=0, drain_s=1.0)
    async with (
        target_worker(model=TimedModel(MODEL, spec, SLOTS, 4096)) as worker,
        open_store(None, ttl_s=3600.0) as store,
    ):
        record = WorkerRecord("target", "t", worker.address, "tested", "", spec.fingerprint, time.time())
        await store.registry.register(record)
        async with running(settings, store) as (models, addresses):
            assert await models.first.fleet.wait_for_target(PATIENCE_S)
            yield addresses, worker


def run_against(addresses: Addresses, stalled_s: float = 30.0) -> LoadRun:
    goal = LatencyGoal(first_token_ms=60e3, token_ms=60e3)
    profile = LoadProfile("tested", DeploymentOptions(MODEL), 25, 6.0, 1.0, (2, 12), goal, stalled_s)
    assert profile.users == ALL_KINDS
    questions = TimedQuestions(MODEL, profile.answer_tokens)
    return LoadRun(f"http://{addresses.http}", addresses.grpc, profile, "soak", False, questions)


async def test_every_kind_of_user_is_served() -> None:
    async with served() as (addresses, _):
        summary = await run_locust(run_against(addresses), {})
    assert summary["good"], summary
    assert summary["faults"] == []
    found = summary["figures"]
    assert min(found["answers"], found["abandoned"], found["refused"]) > 0
    assert found["goodput"] == found["tokens_per_s"] > 0
    assert found["tokens_per_chunk"] == 1.0, "there is no draft"
    assert summary["memory_flat"] is None, "too short to tell"


@pytest.mark.parametrize("mutant", ["changes", pytest.param("loses", marks=pytest.mark.slow)])
async def test_lost_and_changed_tokens_are_seen(mutant: str) -> None:
    async with served() as (addresses, worker):
        deliver = worker.servicer.send_deltas
        spoilt: list[str] = []

        def spoil(deltas: Sequence[Delta], load: EngineLoad) -> None:
            for delta in deltas:
                if delta.tokens and delta.finish_reason is None and not spoilt:
                    spoilt.append(delta.request_id)
                    delta.tokens = [] if mutant == "loses" else [(delta.tokens[0] + 1) % 64]
                    delta.accepted = delta.accepted[: len(delta.tokens)]
            deliver(deltas, load)

        worker.servicer.send_deltas = spoil  # type: ignore[method-assign]
        summary = await run_locust(run_against(addresses), {})
    assert spoilt
    assert not summary["good"]
    assert summary["lost_tokens"] + summary["changed_tokens"] > 0
    assert summary["errors"] == 0, "the stream's counts alone are right"


@pytest.mark.slow
async def test_cut_streams_are_errors() -> None:
    async with served() as (addresses, _):
        host, _, port = addresses.http.rpartition(":")
        async with proxy(lambda: asyncio.open_connection(host, int(port)), cut_after=b"token_ids") as front:
            summary = await run_locust(run_against(replace(addresses, http=f"127.0.0.1:{front}")), {})
    assert not summary["good"]
    assert summary["errors"] > ALL_KINDS
    assert any("chat" in fault for fault in summary["faults"]), summary["faults"]


@pytest.mark.slow
async def test_streams_that_hang_until_the_run_ends_are_errors() -> None:
    async with served() as (addresses, worker):
        deliver, delivered = worker.servicer.send_deltas, [0]

        def stall(deltas: Sequence[Delta], load: EngineLoad) -> None:
            delivered[0] += len(deltas)
            if delivered[0] < 20 * ALL_KINDS:
                deliver(deltas, load)

        worker.servicer.send_deltas = stall  # type: ignore[method-assign]
        summary = await run_locust(run_against(addresses, stalled_s=1.0), {})
    assert not summary["good"]
    hung = {fault.partition(":")[0] for fault in summary["faults"] if "nothing came" in fault}
    assert {"grpc", "chat"} <= hung, summary["faults"]


@pytest.mark.slow
async def test_users_that_crash_are_errors() -> None:
    question = TimedQuestions(MODEL, (2, 4)).short(chat=False)
    questions = RecordedQuestions([], [question], [question])
    async with served() as (addresses, _):
        summary = await run_locust(replace(run_against(addresses), questions=questions), {})
    assert not summary["good"]
    [fault] = summary["faults"]
    assert fault.startswith("a user stopped")
    assert summary["errors"] > 1


@pytest.mark.slow
async def test_missing_speculation_is_seen() -> None:
    async with served() as (addresses, _):
        summary = await run_locust(replace(run_against(addresses), speculative=True), {})
    assert summary["faults"] == []
    assert not summary["good"]
