"""Targets of a real network are killed in mid-answer, all of them: streams pause and go on.

Real processes under the real supervisor. The network is tiny and random but peaked, so that one bit in a key or value
that a replay computes again would show. What a target says plainly and undisturbed is the reference.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from loadtests.chaos.cases import Case, cases
from loadtests.chaos.stack import REPLAYS, ChaosStack, running
from paceline.cli.deployment import Wish
from paceline.config import EngineConfig, SpeculativeConfig
from tests.llamas import VOCABULARY, peaked_llama
from tests.streams import came, client, streaming

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 400
PROMPTS = ("1 2 3", "7 11 13 7 11")

Scene = tuple[ChaosStack, httpx.AsyncClient, list[Case]]


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
    wish = Wish(target, speculation, EngineConfig(threads=1, dtype="float32"), target_workers=2, draft_workers=1)
    said: list[str] = []
    async with running(wish, said.append, 1) as stack, client() as http:
        known = await cases(http, stack.urls["gateway-1"], PROMPTS, TOKENS, {"ignore_eos": True})
        yield stack, http, known


async def test_targets_killed_until_none_is_left(scene: Scene) -> None:
    """Of one the service dies, of the other the compute. What was begun pauses until one of them is back."""
    stack, http, known = scene
    url = stack.urls["gateway-1"]
    first, second = stack.deployment.targets
    async with streaming(http, known, url) as streams:
        await came(streams, 1)
        assert stack.send(first, signal.SIGKILL, "service")
        assert stack.send(second, signal.SIGKILL, "compute")
    for stream in streams:
        stream.check()
    assert await stack.metric(url, REPLAYS) > 0
