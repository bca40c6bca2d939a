"""`paceline bench scaling`: the CPU time of the control plane per token, and the number of processes for a load.

Everything is the real code; only the models are timed ones (`paceline_lab.fake_models.timed_config`). CPU time is that
of the processes or threads that do the work, so clients and other programs do not count.

- `engine`: CPU milliseconds of a target's step beside the model's pass, by the number of requests at once; in
  virtual time, so that ten thousand fit on a small machine. `plain`, and up to `STREAMED` requests `streamed`, with a
  draft that grows ahead; `tokens` are then a request's tokens per step.
- `services`: a stack on this machine, `STREAMS` requests at once. CPU microseconds per token and per request, by
  process, from two loads: long answers and short ones. `draft compute` includes its timed model.
- `frames`: bytes between gateway and target per token and per request, and between target and draft per token.
- `needs`: the number of processes for a load, computed from these by `paceline_lab.simulation.scaling_model`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.http_client import HttpClient, open_client
from paceline.cli.local_stack import LocalStack
from paceline.cli.process_tree import process_and_descendants
from paceline.cli.progress import progress
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.messages import Delta, GenerationRequest
from paceline.wire.target_codec import encode_delta, encode_request
from paceline_lab.bench.bench_measurement import results_kept_on_interrupt
from paceline_lab.bench.measured_stack import cpu_s, ready_stack
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation.pair_simulation import SimulatedPair, simulate
from paceline_lab.simulation.scaling_model import Costs, CpuPerToken, ProcessCounts, process_counts

REQUESTS = (1, 10, 100, 1_000, 10_000)
PROMPT = 16
STREAMED = 100
"""Most requests with a simulated draft: drafts and trees in Python take a minute for more."""
TOKENS = {"plain": 10, "streamed": 32}
"""Tokens of each request in virtual time; the engine learns the price of a row only after some steps."""
TARGET = TimedModelConfig(step_ms=30.0, knee_rows=512)
DRAFT = TimedModelConfig(step_ms=2.0, knee_rows=512, agreement=0.8)
ENGINE = EngineConfig(slots=2**20, max_num_seqs=2**14, max_num_batched_rows=2**18)
SPECULATION = SpeculativeConfig(
    method="draft_model", model="draft", num_speculative_tokens=8, tree_width=2, max_tree_nodes=16
)
SERVED = "timed:step_ms=60,knee_rows=2048"
SERVED_DRAFT = "timed:step_ms=6,knee_rows=2048,agreement=0.8"
WAYS = ("plain", "streamed")
STREAMS = 48
LONG, SHORT = 160, 4
"""Tokens of an answer."""
SHORT_REQUEST_ROUNDS = 12
"""Short answers per stream."""
REQUEST_ID = "0" * 32
TOKEN_MS, ANSWER_TOKENS = 50.0, 256
"""The goal of `needs`: time per token, and tokens of an answer."""
LOADS = (100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class EngineStepCost:
    requests: int
    plain_ms: float
    streamed_ms: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True)
class ScalingResult:
    engine: Sequence[EngineStepCost]
    services: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By way and process."""
    frames: Mapping[str, float]
    needs: Sequence[ProcessCounts]


def run(console: Console) -> ScalingResult:
    """Measure and show. Ctrl-C ends the run with what was measured so far. Raises `StartError` or `StateError`."""
    freeze_gc_heap()  # as a target's compute does
    engine: list[EngineStepCost] = []
    services: dict[str, dict[str, CpuPerToken]] = {}
    with (
        results_kept_on_interrupt(console),
        progress(console, "loads of engine and services", len(REQUESTS) + len(WAYS)) as done,
    ):
        for requests in REQUESTS:
            engine.append(measure_engine(requests))
            done()
        asyncio.run(_services(console, services, done))
    _show_engine(console, engine)
    needs: list[ProcessCounts] = []
    if len(services) == len(WAYS):
        _show_services(console, services)
        plain = services["plain"]
        costs = Costs([(each.requests, each.plain_ms / 1e3) for each in engine], plain["target"], plain["gateway"])
        needs = [process_counts(load, costs, TARGET, TOKEN_MS, ANSWER_TOKENS) for load in LOADS]
        _show_needs(console, needs)
    by_way = {way: {name: _micro(cost) for name, cost in each.items()} for way, each in services.items()}
    return ScalingResult(engine, by_way, frames(), needs)


def measure_engine(requests: int) -> EngineStepCost:
    """CPU time of a step in virtual time."""
    plain = simulate(SimulatedPair(TARGET, None, engine=ENGINE), _generation_requests(requests, TOKENS["plain"]))
    plain_ms = _step_ms(plain.step_cpu_s, requests)
    if requests > STREAMED:
        return EngineStepCost(requests, plain_ms, None, None)
    pair = SimulatedPair(TARGET, DRAFT, rtt_s=0.5e-3, speculation=SPECULATION, engine=ENGINE)
    streamed = simulate(pair, _generation_requests(requests, TOKENS["streamed"]))
    tokens = requests * TOKENS["streamed"] / sum(count for count, _ in streamed.step_cpu_s)
    return EngineStepCost(requests, plain_ms, _step_ms(streamed.step_cpu_s, requests), round(tokens, 2))


def _generation_requests(requests: int, tokens: int) -> list[tuple[float, GenerationRequest]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    prompts = ([(number >> shift) % 512 for shift in range(PROMPT)] for number in range(requests))
    return [(0.0, GenerationRequest(f"r{number}", prompt, sampling)) for number, prompt in enumerate(prompts)]


def _step_ms(steps: Sequence[tuple[int, float]], requests: int) -> float:
    """Median over the second half of the steps in which all requests got tokens; the first ones prefilled prompts."""
    full = [seconds for count, seconds in steps if count == requests]
    return round(1e3 * median(full[len(full) // 2 :]), 3)


def frames() -> dict[str, float]:
    """Bytes of encoded messages, without gRPC's own headers, which a frame has once."""
    sampling = SamplingParams()
    generation_request = encode_request(
        GenerationRequest(REQUEST_ID, list(range(1000, 1000 + ANSWER_TOKENS)), sampling)
    )
    one, four = (encode_delta(Delta(REQUEST_ID, [1000] * n, [True] * n), REQUEST_ID).ByteSize() for n in (1, 4))
    pair = simulate(
        SimulatedPair(TARGET, DRAFT),
        [(0.0, GenerationRequest("r", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=96)))],
    )
    return {
        "submit_256_token_prompt": generation_request.ByteSize(),
        "delta_of_1_token": one,
        "delta_of_4_tokens": four,
        "draft_link_per_token": round(pair.wire_bytes_per_token, 1),
    }


async def _services(console: Console, services: dict[str, dict[str, CpuPerToken]], done: Callable[[], None]) -> None:
    """Measure a stack, into `services`, by way."""
    speculation = SPECULATION.model_copy(update={"model": SERVED_DRAFT})
    engine = EngineConfig(slots=2**17, max_num_seqs=2 * STREAMS, max_num_batched_rows=2048, cpus=())
    async with (
        ready_stack(plan_deployment(DeploymentOptions(SERVED, speculation, engine)), console) as stack,
        open_client(stack.deployment.url) as client,
    ):
        await _load(client, 2, SHORT, speculative=True)  # the first request waits for its draft
        for way in WAYS:
            services[way] = await _cost_per_token(stack, client, speculative=way == "streamed")
            done()


async def _cost_per_token(stack: LocalStack, client: HttpClient, speculative: bool) -> dict[str, CpuPerToken]:
    """Cost per token and per request, from two loads: two equations with two unknowns."""
    long = await _used(stack, client, 1, LONG, speculative=speculative)
    short = await _used(stack, client, SHORT_REQUEST_ROUNDS, SHORT, speculative=speculative)
    few, many = STREAMS, STREAMS * SHORT_REQUEST_ROUNDS
    costs = {}
    for name in long:
        request_s = max(0.0, (short[name] - long[name] * SHORT * many / (LONG * few)) / (many - many * SHORT / LONG))
        costs[name] = CpuPerToken(max(0.0, (long[name] - request_s * few) / (few * LONG)), request_s)
    return costs


async def _used(
    stack: LocalStack, client: HttpClient, rounds: int, tokens: int, *, speculative: bool
) -> dict[str, float]:
    """CPU seconds of each process for `rounds` rounds of `STREAMS` answers."""
    before = _cpu(stack)
    await _load(client, rounds, tokens, speculative=speculative)
    return {name: seconds - before[name] for name, seconds in _cpu(stack).items()}


async def _load(client: HttpClient, rounds: int, tokens: int, *, speculative: bool) -> None:
    async def stream(number: int) -> None:
        for turn in range(rounds):
            prompt = " ".join(str((number * 7 + turn * 11 + i * 13) % 512) for i in range(PROMPT))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            await client.collect("/v1/completions", body | {"speculative": speculative})

    await asyncio.gather(*map(stream, range(STREAMS)))


def _cpu(stack: LocalStack) -> dict[str, float]:
    """CPU seconds by `gateway`, `target`, `target compute`, `draft`, `draft compute`."""
    used: defaultdict[str, float] = defaultdict(float)
    for name, child in stack.supervisor.children.items():
        kind = name.partition("-")[0]
        for process in process_and_descendants(child.pid) if child.pid else ():
            used[kind if process == child.pid else f"{kind} compute"] += cpu_s(process)
    return dict(used)


def _micro(cost: CpuPerToken) -> dict[str, float]:
    return {"token_us": round(1e6 * cost.token_s, 1), "request_us": round(1e6 * cost.request_s, 1)}


def _show_engine(console: Console, lines: Sequence[EngineStepCost]) -> None:
    table = Table(
        "requests", "plain, ms a step", "µs per token", "streamed, ms a step", "µs per token", "tokens a step"
    )
    for line in lines:
        table.add_row(
            f"{line.requests:,}",
            f"{line.plain_ms:.2f}",
            f"{1e3 * line.plain_ms / line.requests:.0f}",
            *_streamed(line),
        )
    console.print(table)


def _streamed(line: EngineStepCost) -> Sequence[str]:
    if line.streamed_ms is None or line.tokens is None:
        return ()
    per_token = 1e3 * line.streamed_ms / line.requests / line.tokens
    return f"{line.streamed_ms:.2f}", f"{per_token:.0f}", f"{line.tokens:.2f}"


def _show_services(console: Console, services: Mapping[str, Mapping[str, CpuPerToken]]) -> None:
    table = Table("process", *(f"{way}, µs per {what}" for way in services for what in ("token", "request")))
    for name in services["plain"]:
        cells = [f"{1e6 * s:.0f}" for way in services.values() for s in (way[name].token_s, way[name].request_s)]
        table.add_row(name, *cells)
    console.print(table)


def _show_needs(console: Console, needs: Sequence[ProcessCounts]) -> None:
    table = Table(*(name.replace("_", " ") for name in asdict(needs[0])))
    for line in needs:
        table.add_row(*(f"{value:,}" for value in asdict(line).values()))
    console.print(table)
