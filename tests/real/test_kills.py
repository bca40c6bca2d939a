"""A published model behind a real gateway: a killed draft and a killed target change no token."""

from __future__ import annotations

import asyncio
import signal

import pytest

from loadtests.chaos.chaos_cases import SENTENCES, cases
from loadtests.chaos.chaos_stack import REPLAYS, running
from paceline.cli.deployment import DeploymentOptions
from paceline.cli.model_download import download
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.model_names import SMOLLM2
from tests.helpers.streams import PATIENCE_S, client, streaming
from tests.helpers.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOKENS = 120


async def test_killed_workers_change_no_token() -> None:
    """First the draft, then a target, whose requests go on at the other one."""
    model = str(download(SMOLLM2))
    speculation = SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=4, tree_width=2)
    engine = EngineConfig(threads=1, max_model_len=1024, slots=8192)
    options = DeploymentOptions(model, speculation, engine, target_workers=2, draft_workers=1)
    lines: list[str] = []
    async with running(options, lines.append, 1) as stack, client() as http, asyncio.timeout(6 * PATIENCE_S):
        url = stack.urls["gateway-1"]
        known = await cases(http, url, SENTENCES[:2], TOKENS, {"ignore_eos": True})
        replays = await stack.metric(url, REPLAYS)
        while await stack.metric(url, REPLAYS) == replays:  # the killed target may have had no request
            await stack.wait_ready()
            async with streaming(http, known, url) as streams:
                for workers, tokens in ((stack.deployment.drafts, 20), (stack.deployment.targets, 40)):
                    await until(lambda: any(len(stream.got.tokens) > tokens for stream in streams))  # noqa: B023
                    assert stack.send(next(iter(workers)), signal.SIGKILL, "both")
            for stream in streams:
                stream.check()
