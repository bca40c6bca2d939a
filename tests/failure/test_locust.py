"""The load test's users against a gateway and a target over a timed model: no error, every token.

Changed tokens, broken and hanging streams, and users that crash must be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Literal

import pytest

from loadtests.load_figures import LatencyGoal
from loadtests.load_profiles import LoadProfile, LoadRun
from loadtests.load_requests import RecordedQuestions, TimedQuestions
from loadtests.locust_process import run_locust
from paceline.cli.deployment import DeploymentOptions
from paceline.messages import Delta, EngineLoad
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from tests.helpers.streams import gateway_for, timed_target
from tests.helpers.waiting import until
from tests.helpers.workers import host_and_port

pytestmark = pytest.mark.alone

MODEL = "timed:vocabulary=64,step_ms=10"
ALL_KINDS = 27
"""With this many users, their weights give one of each kind."""
Mutant = Literal["", "changes", "stalls", "cuts", "crashes"]


async def locust(mutant: Mutant = "") -> dict[str, Any]:
    """The summary of a short run against a stack with this fault."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(timed_target(MODEL))
        gateway = await stack.enter_async_context(gateway_for(MODEL, worker.address))
        network = stack.enter_context(ImpairmentProxy(host_and_port(gateway.http), Impairment()))
        deliver, delivered = worker.servicer.send_deltas, [0]

        def spoil(deltas: Sequence[Delta], load: EngineLoad) -> None:
            for delta in deltas:
                delivered[0] += 1
                if mutant == "changes" and delivered[0] % 20 == 0 and delta.tokens:
                    delta.tokens = [(delta.tokens[0] + 1) % 64, *delta.tokens[1:]]
            if mutant != "stalls" or delivered[0] < 20 * ALL_KINDS:
                deliver(deltas, load)

        worker.servicer.send_deltas = spoil  # type: ignore[method-assign]
        goal = LatencyGoal(first_token_ms=60e3, token_ms=60e3)
        stalled_s = 1.0 if mutant == "stalls" else 30.0
        profile = LoadProfile("tested", DeploymentOptions(MODEL), 25, 5.0, 1.0, (2, 12), goal, stalled_s)
        assert profile.users == ALL_KINDS
        questions = TimedQuestions(MODEL, profile.answer_tokens)
        run = LoadRun(f"http://{network.address}", gateway.grpc, profile, "soak", False, questions)
        if mutant == "crashes":
            question = questions.short(chat=False)
            run = replace(run, questions=RecordedQuestions([], [question], [question]))
        running = asyncio.create_task(run_locust(run, {}))
        if mutant == "cuts":
            await until(lambda: network.traffic.back > 100_000)
            network.cut()
        return await running


async def test_every_kind_of_user_is_served() -> None:
    summary = await locust()
    assert summary["good"], summary
    assert summary["faults"] == []
    found = summary["figures"]
    assert min(found["answers"], found["abandoned"], found["refused"]) > 0
    assert found["goodput"] == found["tokens_per_s"] > 0
    assert found["tokens_per_chunk"] == 1.0, "there is no draft"
    assert summary["memory_flat"] is None, "too short to tell"


async def test_changed_tokens_are_seen() -> None:
    summary = await locust("changes")
    assert not summary["good"]
    assert summary["changed_tokens"] > 0
    assert summary["errors"] == 0, "the stream's counts alone are right"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "faults"),
    [
        ("stalls", ["chat: nothing came", "grpc: nothing came"]),
        ("cuts", ["chat"]),
        ("crashes", ["a user stopped"]),
    ],
)
async def test_broken_streams_and_users_are_errors(mutant: Mutant, faults: Sequence[str]) -> None:
    summary = await locust(mutant)
    assert not summary["good"]
    assert summary["errors"] > 1
    for fault in faults:
        assert any(each.startswith(fault) for each in summary["faults"]), summary["faults"]
