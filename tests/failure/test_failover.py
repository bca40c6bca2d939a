"""A target with a real network is killed during requests: streams pause and continue on another target.

Real processes under the real supervisor. The network is tiny and random but peaked, so that one different bit in a key
or value after a replay changes tokens. The reference are a target's own tokens without speculation.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from loadtests.chaos.chaos_cases import ChaosCase, cases
from loadtests.chaos.chaos_stack import REPLAYS, ChaosStack, running
from loadtests.chaos.faults import ProcessPart
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.streams import PATIENCE_S, Stream, client, streaming

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

TOKENS = 400
MARGIN = 100
"""Tokens left, at least, when a target is killed."""
PROMPTS = ("1 2 3", "7 11 13 7 11")

Scene = tuple[ChaosStack, httpx.AsyncClient, list[ChaosCase]]


def save_model(folder: Path, noise: float) -> str:
    peaked_llama(noise).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("models")
    target, draft = save_model(folder / "target", 0.0), save_model(folder / "draft", 0.02)
    speculation = SpeculativeConfig(method="draft_model", model=draft, row_budget=False)
    # One request at a time: so small a network would finish several before the test looks.
    engine = EngineConfig(threads=1, dtype="float32", max_num_seqs=1)
    options = DeploymentOptions(target, speculation, engine, target_workers=2, draft_workers=1)
    log: list[str] = []
    async with running(options, log.append, 1) as stack, client() as http:
        known = await cases(http, stack.urls["gateway-1"], PROMPTS, TOKENS, {"ignore_eos": True})
        assert all(len(case.expected.tokens) == TOKENS for case in known if not case.name.startswith("stop"))
        yield stack, http, known


async def both_targets_busy(streams: Sequence[Stream]) -> bool:
    """Wait until two streams have begun and are far from their end; each target serves one. False: all have ended."""
    while not all(stream.got.complete for stream in streams):
        if sum(0 < len(stream.got.tokens) < TOKENS - MARGIN and not stream.got.complete for stream in streams) == 2:
            return True
        await asyncio.sleep(0.001)
    return False


@pytest.mark.parametrize("half", [pytest.param("service", marks=pytest.mark.slow), "compute"])
async def test_a_target_is_killed(scene: Scene, half: ProcessPart) -> None:
    """Its running request continues on the other target, and its waiting ones start there.

    So small a network finishes within a second: repeat until one target was killed while both were busy.
    """
    stack, http, known = scene
    url = stack.urls["gateway-1"]
    replays = await stack.metric(url, REPLAYS)
    async with asyncio.timeout(2 * PATIENCE_S):
        while await stack.metric(url, REPLAYS) == replays:
            await stack.wait_ready()
            async with streaming(http, known, url) as streams:
                if await both_targets_busy(streams):
                    assert stack.send(next(iter(stack.deployment.targets)), signal.SIGKILL, half)
            for stream in streams:
                stream.check()
