"""One run: references first, then clients and blows together, then the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx

from loadtests.chaos.chaos_cases import NUMBERS, SENTENCES, ChaosCase, cases
from loadtests.chaos.chaos_client import ChaosClient
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.chaos_stack import REPLAYS, ChaosStack
from loadtests.chaos.faults import Fault, random_faults
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.model_names import is_fake_model

log = logging.getLogger(__name__)

TARGET = "timed:vocabulary=512,step_ms=10"
DRAFT = "timed:vocabulary=512,step_ms=1,agreement=0.8"
RECOVERY_S = 120.0
"""After the last blow, everything has to be back and idle within this time."""
SILENCE_S = 180.0
"""A connection on which nothing comes for so long is broken."""
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What to do to a stack. Lengths in seconds and tokens."""

    duration_s: float = 300.0
    every_s: float = 2.0
    """Between two blows, on average."""
    clients: int = 16
    max_tokens: int = 300
    seed: int = 0


def chaos_deployment_options(model: str = TARGET, targets: int = 3, drafts: int = 2) -> DeploymentOptions:
    """What to start: the timed model and its draft, or a model with weights and the draft it ships with."""
    speculation = SpeculativeConfig(method="draft_model", model=DRAFT) if model == TARGET else None
    return DeploymentOptions(model, speculation, EngineConfig(threads=1), target_workers=targets, draft_workers=drafts)


async def run(stack: ChaosStack, plan: ChaosOptions, script: Iterable[Fault] | None = None) -> ChaosReport:
    """`script`: what to do instead of random blows."""
    script = random_faults(stack.victims, plan.seed, plan.every_s, plan.duration_s) if script is None else script
    tally = ChaosReport()
    async with _http() as http:
        known = await references(stack, http, plan.max_tokens)
        log.info("%d answers are known; %d clients start", len(known), plan.clients)
        stop = asyncio.Event()
        clients = [ChaosClient(stack, http, tally, Random(plan.seed + n)) for n in range(plan.clients)]
        async with _counting_replays(stack, tally):
            running = asyncio.gather(*(client.run(known, stop) for client in clients))
            await _strike(stack, script, plan.duration_s, tally)
            stop.set()
            await running
    await _settle(stack, tally)
    return tally


async def references(stack: ChaosStack, http: httpx.AsyncClient, max_tokens: int) -> list[ChaosCase]:
    prompts = NUMBERS if is_fake_model(stack.deployment.model) else SENTENCES
    return await cases(http, next(iter(stack.urls.values())), prompts, max_tokens)


@asynccontextmanager
async def _http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a dead gateway's are of no use
    async with httpx.AsyncClient(timeout=SILENCE_S, limits=limits, trust_env=False) as http:
        yield http


async def _strike(stack: ChaosStack, script: Iterable[Fault], duration_s: float, tally: ChaosReport) -> None:
    """Do all of it, until the time is over."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        for blow in script:
            await asyncio.sleep(began + blow.at_s - loop.time())
            tally.record_fault(blow, stack.inject(blow))
            log.info("%6.1f s: %s %s %s", blow.at_s, blow.kind, ", ".join(blow.victims), blow.half)
            if blow.kind == "stop":
                loop.call_later(blow.lasts_s, stack.resume, blow.victims)
        await asyncio.sleep(began + duration_s - loop.time())
    finally:
        stack.resume()


async def _settle(stack: ChaosStack, tally: ChaosReport) -> None:
    """Wait until everybody is back, and nobody has a request any more."""
    try:
        async with asyncio.timeout(RECOVERY_S):
            await stack.wait_ready()
            await stack.idle()
    except TimeoutError:
        tally.unsettled = 1
        log.error("not whole and idle %g s after the end", RECOVERY_S)


@asynccontextmanager
async def _counting_replays(stack: ChaosStack, tally: ChaosReport) -> AsyncIterator[None]:
    """Add up what each life of each gateway told last."""
    lives: dict[tuple[str, int | None], float] = {}

    async def look() -> None:
        while True:
            for name, url in stack.urls.items():
                life = (name, stack.child(name).pid)
                lives[life] = max(lives.get(life, 0.0), await stack.metric(url, REPLAYS))
                tally.replays = int(sum(lives.values()))
            await asyncio.sleep(LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])
