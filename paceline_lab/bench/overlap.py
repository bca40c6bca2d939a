"""`paceline bench overlap`: the gain from hiding drafts and network behind verification.

The whole stack on this machine, over models that take as long as an accelerator would
(`paceline_lab.fake_models.timed_model`), and with a slow network between target and draft
(`paceline_lab.bench.impairment_proxy`). Three ways to decode:

- `plain`: no draft;
- `lockstep`: after each commit the target waits for a chain of K draft tokens, then verifies. K is the best of `CHAINS`
  for each row;
- `streamed`: the draft grows ahead, and the target verifies the nodes it has. This is Paceline's way.

Tokens per second are those of all requests together, over the time from the first request sent to the last token, on
the client's clock. The ways take turns. One request at a time: different prompts, and all count. Many requests: the
same prompts again and again, and the median counts. All ways must give the same tokens, or the benchmark fails.

- `rtt`: one request at a time, by the round trip between target and draft.
- `concurrency`: many requests at once, on a roofline: beyond `knee_rows` rows, a pass takes longer. `streamed` is also
  compared with a fixed number of nodes per verification, the best of `FIXED`, instead of a row budget.
- `useless_draft_ratio`: streamed over plain, with a draft that is always wrong and always confident; the worst of
  several round trips and numbers of requests.
- `wire_bytes_per_token`: between target and draft, both ways, TCP's payload, per committed token; the worst
  row of `rtt`.
- `plan_error`: relative error of the simulation behind `paceline plan`, for the prompts of `rtt`; the worst row. Its
  inputs are visible in any deployment: the time of a plain step, and, from the workers' metrics, of a round of drafting
  and of a round trip.
- `killed`: a draft worker is killed with SIGKILL in the middle of an answer, and restarted by the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import harmonic_mean, median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from paceline.cli.deployment import LOOPBACK, DeploymentOptions, plan_deployment
from paceline.cli.http_client import RESPONSE_OPTIONS, HttpClient, HttpCompletion, open_client
from paceline.cli.local_stack import LocalStack
from paceline.cli.progress import progress
from paceline.config import EngineConfig, SpeculativeConfig
from paceline_lab.bench.bench_measurement import results_kept_on_interrupt
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from paceline_lab.bench.measured_stack import ready_stack
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation.pair_simulation import SimulatedPair
from paceline_lab.simulation.sequential_forecast import forecast_sequential

TARGET = "timed:vocabulary=1024,step_ms=10,knee_rows=128"
DRAFT = "timed:vocabulary=1024,step_ms=1,knee_rows=128,agreement=0.8"
USELESS = "timed:vocabulary=1024,step_ms=1,knee_rows=128,agreement=0,bias=60"
ROUND_TRIPS_MS = (0.0, 2.0, 10.0, 40.0)
CONCURRENCY = (1, 8, 32, 64)
CHAINS = (3, 4, 5, 6, 8, 10)
FIXED = (1, 2, 4, 8, 16)
USELESS_CASES = ((0.0, 1), (10.0, 1), (40.0, 1), (0.0, 8), (0.0, 32), (0.0, 64))
"""Round trips in milliseconds, and requests."""
TOKENS = 200
PROMPTS = tuple(f"{7 * i} {11 * i} {13 * i}" for i in range(1, 65))
ROUNDS = "paceline_draft_round_seconds"
ROUND_TRIPS = "paceline_draft_link_round_trip_seconds"
ALONE = 6
"""Prompts of a row with one request at a time."""
TURNS = 6
"""Repetitions of each way with many requests at once."""
ENGINE = EngineConfig(slots=65536, max_num_seqs=64, max_num_batched_rows=1024, cpus=())


Way = Callable[[Sequence[str]], Awaitable[float]]
"""Decodes prompts; returns tokens per second."""


class OverlapOutputDiffersError(Exception):
    """Two ways to decode gave different tokens."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    rtt_ms: float
    plain: float
    lockstep: float
    streamed: float
    lockstep_k: int
    wire_bytes_per_token: float
    forecast: float


@dataclass(frozen=True, slots=True)
class Concurrency:
    requests: int
    plain: float
    lockstep: float
    streamed: float
    lockstep_k: int
    fixed: float
    fixed_k: int


@dataclass(slots=True)
class OverlapResult:
    """Measurements so far."""

    rtt: list[RoundTrip] = field(default_factory=list)
    concurrency: list[Concurrency] = field(default_factory=list)
    useless: list[float] = field(default_factory=list)
    """Streamed over plain."""
    killed: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For JSON; null for what was not measured."""
        errors = [abs(line.forecast / line.streamed - 1) for line in self.rtt]
        return {
            "rtt": [asdict(line) for line in self.rtt],
            "concurrency": [asdict(line) for line in self.concurrency],
            "useless_draft_ratio": round(min(self.useless), 3) if self.useless else None,
            "wire_bytes_per_token": max((line.wire_bytes_per_token for line in self.rtt), default=None),
            "plan_error": round(max(errors), 3) if errors else None,
            "killed": self.killed or None,
        }


@dataclass(frozen=True, slots=True)
class Timed:
    """A histogram's count and sum in seconds."""

    count: float
    seconds: float

    def since(self, before: Timed) -> float:
        """Mean seconds since then."""
        return (self.seconds - before.seconds) / (self.count - before.count)


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """A deployment's metrics: rounds of drafting, and round trips between target and draft."""

    rounds: Timed
    round_trips: Timed


@dataclass(slots=True)
class OverlapBench:
    """One stack, its client, and the network to its draft."""

    stack: LocalStack
    client: HttpClient
    link: ImpairmentProxy
    tokens: dict[str, list[int]]
    """Output tokens by prompt, the same for every way: shared by all stacks."""

    async def _completion(self, body: Mapping[str, Any]) -> HttpCompletion:
        """Without streaming: reading many streams takes as much of this machine as serving them."""
        response = await self.client.http.post("/v1/completions", json={**RESPONSE_OPTIONS, **body})
        completion = HttpCompletion()
        completion.take(response.raise_for_status().json())
        return completion

    async def rate(self, prompts: Sequence[str], at_once: int = 1, count: int = TOKENS, **options: Any) -> float:
        """Tokens per second over all these prompts. `options` are the requests' `speculative`."""
        body = {"max_tokens": count, "temperature": 0, "speculative": options or True}
        waiting = list(reversed(prompts))
        completions: list[tuple[str, HttpCompletion]] = []

        async def client() -> None:
            while waiting:
                prompt = waiting.pop()
                completions.append((prompt, await self._completion(body | {"prompt": prompt})))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        seconds = time.perf_counter() - began
        for prompt, completion in completions:
            self.check(prompt, completion.tokens)
        return sum(len(completion.tokens) for _, completion in completions) / seconds

    def way(self, at_once: int = 1, **options: Any) -> Way:
        return partial(self.rate, at_once=at_once, **options)

    async def best(self, prompts: Sequence[str], choices: Sequence[int], key: str) -> int:
        """The choice with the highest rate for these prompts at once, each tried with half the tokens."""
        rates = {k: await self.rate(prompts, len(prompts), TOKENS // 2, **{key: k}) for k in choices}
        return max(rates, key=lambda choice: rates[choice])

    async def draft_times(self) -> DraftTimes:
        """Read the metrics."""
        [target], [draft] = self.stack.deployment.targets, self.stack.deployment.drafts
        return DraftTimes(await self._timed(draft, ROUNDS), await self._timed(target, ROUND_TRIPS))

    async def _timed(self, worker_id: str, histogram: str) -> Timed:
        port = self.stack.deployment.metrics[worker_id]
        page = await self.client.http.get(f"http://{LOOPBACK}:{port}/metrics")
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(page.raise_for_status().text):
            samples |= {sample.name: sample.value for sample in family.samples}
        return Timed(samples[f"{histogram}_count"], samples[f"{histogram}_sum"])

    def check(self, prompt: str, tokens: Sequence[int]) -> None:
        """Raises `OverlapOutputDiffersError` if the tokens differ from an earlier output of the prompt."""
        known = self.tokens.setdefault(prompt, list(tokens))
        shorter = min(len(known), len(tokens))
        if known[:shorter] != list(tokens[:shorter]):
            raise OverlapOutputDiffersError(f"after {prompt!r}: {tokens} and {known}")
        if len(tokens) > len(known):
            self.tokens[prompt] = list(tokens)


@dataclass(slots=True)
class OverlapSession:
    """Starts the stacks of one run."""

    console: Console
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @asynccontextmanager
    async def bench(self, draft: str = DRAFT, **changes: Any) -> AsyncIterator[OverlapBench]:
        speculation = SpeculativeConfig(
            **{"method": "draft_model", "model": draft, "num_speculative_tokens": 16, "max_tree_nodes": 64}
            | {"tree_width": 4}
            | changes
        )
        deployment = plan_deployment(DeploymentOptions(TARGET, speculation, ENGINE))
        [(draft_id, port)] = deployment.drafts.items()
        with ImpairmentProxy((LOOPBACK, port), Impairment()) as link:
            deployment = replace(deployment, advertised={draft_id: link.address})
            async with ready_stack(deployment, self.console) as stack, open_client(stack.deployment.url) as client:
                bench = OverlapBench(stack, client, link, self.tokens)
                await bench.rate(PROMPTS[:1], count=32)  # the first request waits for its draft
                yield bench


def run(console: Console) -> OverlapResult:
    """Measure and show. Ctrl-C ends the run with what was measured so far.

    Raises `StartError`, `StateError` or `OverlapOutputDiffersError`.
    """
    result = OverlapResult()
    parts = len(ROUND_TRIPS_MS) + len(CONCURRENCY) + 1 + len(USELESS_CASES)
    with results_kept_on_interrupt(console), progress(console, "networks, loads and faults", parts) as done:
        asyncio.run(_run(OverlapSession(console), result, done))
    _show_round_trips(console, result.rtt)
    _show_concurrency(console, result.concurrency)
    console.print(f"useless draft, streamed over plain: {', '.join(f'{ratio:.3f}' for ratio in result.useless)}")
    return result


async def _run(session: OverlapSession, result: OverlapResult, done: Callable[[], None]) -> None:
    async with session.bench() as streamed:
        async with session.bench(draft_schedule="lockstep", tree_width=1, least_path_probability=0.0) as lockstep:
            for rtt_ms in ROUND_TRIPS_MS:
                result.rtt.append(await _round_trip(rtt_ms, streamed, lockstep))
                done()
            async with session.bench(row_budget=False) as fixed:
                for requests in CONCURRENCY:
                    result.concurrency.append(await _concurrency(requests, streamed, lockstep, fixed))
                    done()
        result.killed = await _killed(streamed)
        done()
    async with session.bench(USELESS) as useless:
        for case in USELESS_CASES:
            result.useless.append(await _useless(useless, *case))
            done()


async def _round_trip(rtt_ms: float, streamed: OverlapBench, lockstep: OverlapBench) -> RoundTrip:
    """One request at a time."""
    for bench in (streamed, lockstep):
        bench.link.impair(Impairment(delay_s=rtt_ms / 2e3))
    prompts = PROMPTS[:ALONE]
    k = await lockstep.best(prompts[:1], CHAINS, "num_speculative_tokens")
    bytes_before, times_before = streamed.link.traffic.total, await streamed.draft_times()
    rates = await _in_turns(
        _batches(1),
        {
            "plain": streamed.way(enabled=False),
            "lockstep": lockstep.way(num_speculative_tokens=k),
            "streamed": streamed.way(),
        },
    )
    sent = streamed.link.traffic.total - bytes_before
    for bench in (streamed, lockstep):
        bench.link.impair(Impairment())
    times = await streamed.draft_times()
    pair = SimulatedPair(
        _with_overhead(TARGET, 1 / rates["plain"]),
        _with_overhead(DRAFT, times.rounds.since(times_before.rounds)),
        rtt_s=times.round_trips.since(times_before.round_trips),
        speculation=streamed.stack.deployment.speculation,
        engine=ENGINE,
    )
    forecast = forecast_sequential(pair, [list(map(int, prompt.split())) for prompt in prompts], TOKENS)
    for prompt, tokens in zip(prompts, forecast.outputs, strict=True):
        streamed.check(prompt, tokens)
    return RoundTrip(
        rtt_ms,
        **rates,
        lockstep_k=k,
        wire_bytes_per_token=round(sent / (ALONE * TOKENS), 1),
        forecast=round(forecast.tokens_per_s, 1),
    )


def _with_overhead(name: str, pass_s: float) -> TimedModelConfig:
    """The timed model with the overhead of this machine: a pass takes `pass_s`."""
    model = TimedModelConfig.parse(name)
    return model.model_copy(update={"overhead_ms": max(0.0, 1e3 * pass_s - model.step_ms)})


async def _concurrency(
    requests: int, streamed: OverlapBench, lockstep: OverlapBench, fixed: OverlapBench
) -> Concurrency:
    prompts = PROMPTS[:requests]
    lockstep_k = await lockstep.best(prompts, CHAINS, "num_speculative_tokens")
    for bench in (streamed, fixed):
        await bench.rate(prompts, requests, TOKENS // 2)
    ways = {
        "plain": streamed.way(requests, enabled=False),
        "lockstep": lockstep.way(requests, num_speculative_tokens=lockstep_k),
        "streamed": streamed.way(requests),
    }
    fixed_ways = {f"{k} nodes": fixed.way(requests, max_tree_nodes=k) for k in FIXED}
    rates = await _in_turns(_batches(requests), ways | fixed_ways)
    by_nodes = {k: rates.pop(f"{k} nodes") for k in FIXED}
    fixed_k = max(by_nodes, key=lambda k: by_nodes[k])
    return Concurrency(requests, **rates, lockstep_k=lockstep_k, fixed=by_nodes[fixed_k], fixed_k=fixed_k)


async def _useless(bench: OverlapBench, rtt_ms: float, requests: int) -> float:
    bench.link.impair(Impairment(delay_s=rtt_ms / 2e3))
    await bench.rate(PROMPTS[:requests], requests)  # the target learns the draft's acceptance
    ways = {"plain": bench.way(requests, enabled=False), "streamed": bench.way(requests)}
    rates = await _in_turns(_batches(requests), ways)
    return rates["streamed"] / rates["plain"]


def _batches(at_once: int) -> list[Sequence[str]]:
    return [PROMPTS[i : i + 1] for i in range(ALONE)] if at_once == 1 else [PROMPTS[:at_once]] * TURNS


async def _in_turns(batches: Sequence[Sequence[str]], ways: Mapping[str, Way]) -> dict[str, float]:
    """The rate of each way, batch by batch in turns, so that other load on the machine slows all alike.

    Harmonic mean over different batches, median over repetitions of one batch.
    """
    average = median if batches[0] == batches[-1] else harmonic_mean
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for batch in batches:
        for way, serve in ways.items():
            rates[way].append(await serve(batch))
    return {way: round(average(each), 1) for way, each in rates.items()}


async def _killed(bench: OverlapBench) -> dict[str, Any]:
    """Rates before the draft is killed, across the kill, and after the restart; tokens are checked as always."""
    [draft_id] = bench.stack.deployment.drafts
    child = bench.stack.supervisor.children[draft_id]
    before = await bench.rate(PROMPTS[:1])

    async def kill() -> None:
        await asyncio.sleep(TOKENS / 4 / before)
        assert child.pid is not None
        os.killpg(child.pid, signal.SIGKILL)  # unlike `child.kill`, the supervisor restarts it

    _, across = await asyncio.gather(kill(), bench.rate(PROMPTS[:1]))
    rates = [await bench.rate(PROMPTS[:1]) for _ in range(10)]
    after = max(rates[-3:])
    return {"before": round(before, 1), "across": round(across, 1), "after": round(after, 1)}


def _show_round_trips(console: Console, lines: Sequence[RoundTrip]) -> None:
    table = Table("round trip", "plain", "lock-step", "streamed", "/ plain", "/ lock-step", "bytes/token", "forecast")
    for line in lines:
        table.add_row(
            f"{line.rtt_ms:g} ms",
            f"{line.plain:.0f}",
            f"{line.lockstep:.0f} (K={line.lockstep_k})",
            f"{line.streamed:.0f}",
            f"{line.streamed / line.plain:.2f}",
            f"{line.streamed / line.lockstep:.2f}",
            f"{line.wire_bytes_per_token:.0f}",
            f"{line.forecast:.0f}",
        )
    console.print(table)


def _show_concurrency(console: Console, lines: Sequence[Concurrency]) -> None:
    table = Table("requests", "plain", "lock-step", "fixed", "streamed", "/ plain", "/ lock-step", "/ fixed")
    for line in lines:
        table.add_row(
            str(line.requests),
            f"{line.plain:.0f}",
            f"{line.lockstep:.0f} (K={line.lockstep_k})",
            f"{line.fixed:.0f} ({line.fixed_k} nodes)",
            f"{line.streamed:.0f}",
            f"{line.streamed / line.plain:.2f}",
            f"{line.streamed / line.lockstep:.2f}",
            f"{line.streamed / line.fixed:.2f}",
        )
    console.print(table)
