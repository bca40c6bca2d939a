"""A model with weights behind a real gateway: the same tokens with a draft, without slots to spare, after a SIGKILL.

Real processes under the real supervisor. The network is tiny and random but peaked, so that one different bit in a key
or value changes tokens. It has so few slots that requests preempt one another. The reference are a target's own tokens
without speculation.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from loadtests.chaos.chaos_cases import ChaosCase, cases
from loadtests.chaos.chaos_stack import REPLAYS, ChaosStack, running
from loadtests.chaos.faults import ProcessPart
from paceline.cli.deployment import LOOPBACK, DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.llamas import peaked_llama
from tests.helpers.streams import PATIENCE_S, client, streaming, unfinished
from tests.helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 250
PROMPTS = ("1 2 3", "7 11 13 7 11")
ACCEPTED, PREEMPTIONS = "paceline_spec_decode_num_accepted_tokens_total", "paceline_num_preemptions_total"

Scene = tuple[ChaosStack, httpx.AsyncClient, list[ChaosCase]]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
async def scene(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    target, draft = (save_checkpoint(tmp_path_factory.mktemp(name)) for name in ("target", "draft"))
    peaked_llama(noise=0.02).save_pretrained(draft)
    speculation = SpeculativeConfig(
        method="draft_model", model=str(draft), num_speculative_tokens=8, tree_width=3, row_budget=False
    )
    engine = EngineConfig(threads=1, dtype=request.param, slots=384, max_num_batched_rows=48)
    options = DeploymentOptions(str(target), speculation, engine, target_workers=2, draft_workers=1)
    lines: list[str] = []
    async with running(options, lines.append, 1) as stack, client() as http:
        known = await cases(http, stack.urls["gateway-1"], PROMPTS, TOKENS, {"ignore_eos": True})
        assert all(len(case.expected.tokens) == TOKENS for case in known if not case.name.startswith("stop"))
        yield stack, http, known


async def total(stack: ChaosStack, name: str) -> float:
    """The sum of this series over the targets."""
    ports = [stack.deployment.metrics[target] for target in stack.deployment.targets]
    return sum([await stack.metric(f"http://{LOOPBACK}:{port}", name) for port in ports])


async def test_speculation_changes_no_token(scene: Scene) -> None:
    """Beside plain requests and cancelled ones."""
    stack, http, known = scene
    url = stack.urls["gateway-1"]
    plain = [ChaosCase(case.name, case.body | {"speculative": False}, case.expected) for case in known[:4]]
    preempted = await total(stack, PREEMPTIONS)
    async with asyncio.timeout(PATIENCE_S):
        while not await total(stack, ACCEPTED) or await total(stack, PREEMPTIONS) == preempted:
            async with streaming(http, known + plain, url) as streams, unfinished(http, known, url) as doomed:
                await until(lambda: any(stream.got.tokens for stream in doomed))
            for stream in streams:
                stream.check()


@pytest.mark.parametrize("half", ["compute", pytest.param("service", marks=pytest.mark.slow)])
async def test_killed_workers_change_no_token(scene: Scene, half: ProcessPart) -> None:
    """First the draft, then a target: its running requests go on at the other one, its waiting ones start there."""
    stack, http, known = scene
    url = stack.urls["gateway-1"]
    replays = await stack.metric(url, REPLAYS)
    async with asyncio.timeout(PATIENCE_S):
        while await stack.metric(url, REPLAYS) == replays:  # on a busy machine the target may be done before its end
            await stack.wait_ready()
            async with streaming(http, known, url) as streams:
                for workers, tokens in ((stack.deployment.drafts, 20), (stack.deployment.targets, 40)):
                    await until(lambda: any(len(stream.got.tokens) > tokens for stream in streams))  # noqa: B023
                    assert stack.send(next(iter(workers)), signal.SIGKILL, half)
            for stream in streams:
                stream.check()
