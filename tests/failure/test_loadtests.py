"""The load test's users against a gateway and a target over a timed model: no error, every token; and if one is lost,
they see it, as they see streams that break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from loadtests.load_figures import LatencyGoal
from loadtests.load_requests import TimedQuestions
from loadtests.load_run import LoadRun
from loadtests.locust_process import run_locust
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
"""Users, by whose weights there is one of each kind."""


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Addresses, TargetWorker]]:
    spec = TimedModelConfig.parse(MODEL)
    settings = GatewaySettings(MODEL, "tested", port=0, drain_s=1.0)
    async with (
        target_worker(model=TimedModel(MODEL, spec, SLOTS, 4096)) as worker,
        open_store(None, ttl_s=3600.0) as store,
    ):
        record = WorkerRecord("target", "t", worker.address, "tested", "", spec.fingerprint, time.time())
        await store.registry.register(record)
        async with running(settings, store) as (models, addresses):
            assert await models.first.fleet.wait_for_target(PATIENCE_S)
            yield addresses, worker


def run_against(addresses: Addresses) -> LoadRun:
    goal = LatencyGoal(first_token_ms=60e3, token_ms=60e3)
    return LoadRun(f"http://{addresses.http}", addresses.grpc, MODEL, False, "soak", 1.0, 6.0, ALL_KINDS, (2, 12), goal)


async def test_every_kind_of_user_is_served() -> None:
    async with served() as (addresses, _):
        told = await run_locust(run_against(addresses), {})
    assert told["good"], told
    assert told["faults"] == []
    found = told["figures"]
    assert min(found["answers"], found["abandoned"], found["refused"]) > 0
    assert found["goodput"] == found["tokens_per_s"] > 0
    assert found["tokens_per_chunk"] == 1.0, "nobody drafts"
    assert told["memory_flat"] is None, "too short to tell"


@pytest.mark.parametrize("mutant", ["changes", pytest.param("loses", marks=pytest.mark.slow)])
async def test_a_token_that_is_lost_or_changed_is_seen(mutant: str) -> None:
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
        told = await run_locust(run_against(addresses), {})
    assert spoilt
    assert not told["good"]
    assert told["lost_tokens"] + told["changed_tokens"] > 0
    assert told["errors"] == 0, "by its counts alone the stream is as it should be"


@pytest.mark.slow
async def test_streams_that_are_cut_are_errors() -> None:
    async with served() as (addresses, _):
        host, _, port = addresses.http.rpartition(":")
        async with proxy(lambda: asyncio.open_connection(host, int(port)), cut_after=b"token_ids") as front:
            told = await run_locust(run_against(replace(addresses, http=f"127.0.0.1:{front}")), {})
    assert not told["good"]
    assert told["errors"] > ALL_KINDS
    assert any("chat" in fault for fault in told["faults"]), told["faults"]


@pytest.mark.slow
async def test_streams_that_hang_until_the_run_ends_are_errors() -> None:
    async with served() as (addresses, worker):
        deliver, told_of = worker.servicer.send_deltas, [0]

        def stall(deltas: Sequence[Delta], load: EngineLoad) -> None:
            told_of[0] += len(deltas)
            if told_of[0] < 20 * ALL_KINDS:
                deliver(deltas, load)

        worker.servicer.send_deltas = stall  # type: ignore[method-assign]
        told = await run_locust(replace(run_against(addresses), stalled_s=1.0), {})
    assert not told["good"]
    hung = {fault.partition(":")[0] for fault in told["faults"] if "nothing came" in fault}
    assert {"grpc", "chat"} <= hung, told["faults"]


@pytest.mark.slow
async def test_users_that_crash_are_errors() -> None:
    question = TimedQuestions(MODEL, (2, 4)).short(chat=False).as_json()
    kinds = {"chats": [], "texts": [question], "longs": [question]}
    async with served() as (addresses, _):
        told = await run_locust(replace(run_against(addresses), recorded=kinds), {})
    assert not told["good"]
    [fault] = told["faults"]
    assert fault.startswith("a user stopped")
    assert told["errors"] > 1


@pytest.mark.slow
async def test_speculation_that_is_asked_for_and_does_not_happen_is_seen() -> None:
    async with served() as (addresses, _):
        told = await run_locust(replace(run_against(addresses), speculative=True), {})
    assert told["faults"] == []
    assert not told["good"]
