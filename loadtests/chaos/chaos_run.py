"""One run: expected answers first, then clients and faults together, then the report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from loadtests.chaos import chaos_cases
from loadtests.chaos.chaos_cases import NUMBERS, SENTENCES, ChaosCase
from loadtests.chaos.chaos_client import ChaosClient
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.chaos_stack import REPLAYS, ChaosStack
from loadtests.chaos.faults import Fault, random_faults
from paceline import family
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions
from paceline.model_names import is_fake_model

log = logging.getLogger(__name__)

TARGET = "timed:vocabulary=512,step_ms=10"
DRAFT = "timed:vocabulary=512,step_ms=1,agreement=0.8"
RECOVERY_S = 120.0
"""After the last fault, everything must be ready and idle within this time."""
READ_TIMEOUT_S = 180.0
"""A connection without data for this long is broken."""
POLL_S = 0.5
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Length and severity of a run."""

    duration_s: float = 300.0
    every_s: float = 2.0
    """Mean time between two faults."""
    clients: int = 16
    max_tokens: int = 300
    seed: int = 0


def chaos_deployment_options(
    model: str = TARGET, targets: int = 3, drafts: int = 2, vllm: VllmOptions | None = None
) -> DeploymentOptions:
    """The deployment: the timed model and its draft, or a model with weights and a draft that it ships with.

    vLLM computes in float32: in bfloat16 two tokens are often so close that their order depends on the batch.
    """
    drafts_of = {
        TARGET: SpeculativeConfig(method="draft_model", model=DRAFT),
        family.HYBRID: SpeculativeConfig(method="mtp"),
    }
    speculation = drafts_of.get(model)
    engine = EngineConfig(threads=1)
    if vllm is not None:
        engine = EngineConfig(threads=1, cpus=(), dtype="float32")
    return DeploymentOptions(model, speculation, engine, target_workers=targets, draft_workers=drafts, vllm=vllm)


def default_vllm_options() -> VllmOptions:
    """The environment of `make test-vllm`, and small engines, several of which fit on one machine."""
    small = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 2**29, "enforce_eager": True}
    return VllmOptions(python=str(VLLM_PYTHON), engine_args=small)


async def run(stack: ChaosStack, options: ChaosOptions, script: Iterable[Fault] | None = None) -> ChaosReport:
    """Load the stack and inject faults: those of `script`, or random ones."""
    script = (
        random_faults(stack.victims, options.seed, options.every_s, options.duration_s) if script is None else script
    )
    report = ChaosReport()
    async with _http() as http:
        cases = await references(stack, http, options.max_tokens)
        log.info("%d answers are known; %d clients start", len(cases), options.clients)
        stop = asyncio.Event()
        clients = [ChaosClient(stack, http, report, Random(options.seed + n)) for n in range(options.clients)]
        async with _counting_replays(stack, report):
            running = asyncio.gather(*(client.run(cases, stop) for client in clients))
            await _inject_faults(stack, script, options.duration_s, report)
            stop.set()
            await running
    await _settle(stack, report)
    return report


async def references(stack: ChaosStack, http: httpx.AsyncClient, max_tokens: int) -> list[ChaosCase]:
    """Every case with the answer of the undisturbed stack."""
    prompts = NUMBERS if is_fake_model(stack.deployment.model) else SENTENCES
    # The last bits of vLLM's log-probabilities depend on the batch.
    more = None if stack.deployment.vllm is None else {"logprobs": None}
    return await chaos_cases.cases(http, next(iter(stack.urls.values())), prompts, max_tokens, more)


@asynccontextmanager
async def _http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=0
    )  # connections to a dead gateway are useless
    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S, limits=limits, trust_env=False) as http:
        yield http


async def _inject_faults(stack: ChaosStack, script: Iterable[Fault], duration_s: float, report: ChaosReport) -> None:
    """Inject each fault at its time, until the time is over."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        for fault in script:
            await asyncio.sleep(began + fault.at_s - loop.time())
            report.record_fault(fault, stack.inject(fault))
            log.info("%6.1f s: %s %s %s", fault.at_s, fault.kind, ", ".join(fault.victims), fault.half)
            if fault.kind == "stop":
                loop.call_later(fault.lasts_s, stack.resume, fault.victims)
        await asyncio.sleep(began + duration_s - loop.time())
    finally:
        stack.resume()


async def _settle(stack: ChaosStack, report: ChaosReport) -> None:
    """Wait until every process is ready and no worker has a request."""
    try:
        async with asyncio.timeout(RECOVERY_S):
            await stack.wait_ready()
            await stack.idle()
    except TimeoutError:
        report.unsettled = 1
        log.error("not ready and idle %g s after the end", RECOVERY_S)


@asynccontextmanager
async def _counting_replays(stack: ChaosStack, report: ChaosReport) -> AsyncIterator[None]:
    """Keep `report.replays` at the sum of the last count of each gateway process."""
    counts: dict[tuple[str, int | None], float] = {}

    async def poll() -> None:
        while True:
            for name, url in stack.urls.items():
                process = (name, stack.child(name).pid)
                counts[process] = max(counts.get(process, 0.0), await stack.metric(url, REPLAYS))
                report.replays = int(sum(counts.values()))
            await asyncio.sleep(POLL_S)

    polling = asyncio.create_task(poll())
    try:
        yield
    finally:
        polling.cancel()
        await asyncio.wait([polling])
