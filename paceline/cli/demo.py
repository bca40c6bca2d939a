"""`paceline demo`: the same tokens, sooner.

Starts the whole stack with the shipped models and asks it for code and for answers, one request at a time, greedy
and at temperature 0.8; each with speculation and without it, on one engine, in turns, so that whatever else the
machine does hits both alike. Tokens must be equal. Speeds are medians over requests:

- `*_tokens_per_s` on the target's own clock, from a request's arrival to its last token, prompt included;
- `*_tokens_per_s_http` on the client's clock, which adds gateway, HTTP and event streams;
- `speedup` is the ratio of the two medians.

Each prompt is asked once before anything is measured, so both find it in the prefix cache. `ready_s` runs from the
start of the command to the first moment at which requests are served. `rss_mb` is the proportional set size of the
whole process tree after the measurements: memory that processes share is counted once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.rule import Rule

from paceline.cli.client import Answer, Client, open_client
from paceline.cli.colours import LEGEND, Painter, summary
from paceline.cli.deployment import Wish, plan
from paceline.cli.processes import tree_pss_mb
from paceline.cli.stack import ready_stack
from paceline.cli.workloads import Workload, workloads

TEMPERATURES = (0.0, 0.8)
SEED = 7
MAX_TOKENS = 96
REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload at one temperature."""

    name: str
    temperature: float
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    acceptance_length: float
    plain_tokens_per_s_http: float
    speculative_tokens_per_s_http: float
    speedup_http: float


@dataclass(frozen=True, slots=True)
class Result:
    identical: bool
    workloads: Sequence[Measured]
    ready_s: float
    rss_mb: float | None


@dataclass(slots=True)
class Runs:
    """The answers of one workload at one temperature, by prompt and then by repetition."""

    workload: Workload
    temperature: float
    plain: list[list[Answer]] = field(default_factory=list)
    speculative: list[list[Answer]] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return all(
            len({tuple(answer.tokens) for answer in (*plain, *speculative)}) == 1
            for plain, speculative in zip(self.plain, self.speculative, strict=True)
        )

    def measured(self) -> Measured:
        plain = [answer for answers in self.plain for answer in answers]
        speculative = [answer for answers in self.speculative for answer in answers]
        own = [median(answer.tokens_per_s for answer in answers) for answers in (plain, speculative)]
        http = [median(answer.tokens_per_s_http for answer in answers) for answers in (plain, speculative)]
        return Measured(
            self.workload.name,
            self.temperature,
            *_rounded(own[0], own[1], own[1] / own[0], acceptance_length(speculative)),
            *_rounded(http[0], http[1], http[1] / http[0]),
        )


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Accepted tokens per verification, without the bonus token."""
    verifications = sum(answer.speculation["verifications"] for answer in answers)
    return float(sum(answer.speculation["accepted_tokens"] for answer in answers) / max(verifications, 1))


async def demo(console: Console, began: float) -> Result:
    """Start, show, measure and stop everything. `began`: when the command did. Raises `StartError`, `StateError`."""
    async with ready_stack(plan(Wish()), console) as stack, open_client(stack.deployment.url) as client:
        ready_s = time.monotonic() - began
        console.print(f"ready after {ready_s:.1f} s ·", LEGEND)
        runs = [await _run(client, console, *case) for case in _cases()]
        rss_mb = tree_pss_mb()
    identical = all(run.identical for run in runs)
    return Result(identical, [run.measured() for run in runs], *_rounded(ready_s, rss_mb))


def _cases() -> list[tuple[Workload, float]]:
    return [(workload, temperature) for workload in workloads() for temperature in TEMPERATURES]


async def _run(client: Client, console: Console, workload: Workload, temperature: float) -> Runs:
    """Show the first prompt's answer, then measure all of them."""
    console.print(Rule(f"{workload.name}, temperature {temperature:g}"))
    sampling = {"temperature": temperature, "seed": SEED, "max_tokens": MAX_TOKENS}
    bodies = [body | sampling for body in workload.bodies]
    shown = await client.stream(workload.path, bodies[0], Painter(console))
    console.print(f"\n\n[dim]{summary(shown)}[/dim]")
    runs = Runs(workload, temperature)
    with console.status("measuring"):
        for body in bodies:
            await _measure(client, runs, body)
    _print(console, runs)
    return runs


async def _measure(client: Client, runs: Runs, body: dict[str, Any]) -> None:
    """Ask one prompt in turns, with speculation and without it."""
    plain, speculative = [], []
    await client.stream(runs.workload.path, body)
    for _ in range(REPETITIONS):
        plain.append(await client.collect(runs.workload.path, body | {"speculative": False}))
        speculative.append(await client.collect(runs.workload.path, body))
    runs.plain.append(plain)
    runs.speculative.append(speculative)


def _print(console: Console, runs: Runs) -> None:
    measured = runs.measured()
    console.print(
        f"plain {measured.plain_tokens_per_s:.0f} tokens/s, speculative {measured.speculative_tokens_per_s:.0f}: "
        f"[bold]{measured.speedup:.2f} ×[/bold] (over HTTP {measured.speedup_http:.2f} ×)"
    )
    if runs.identical:
        console.print(f"identical output: {len(runs.plain)} prompts, {2 * REPETITIONS} answers each", style="green")
    else:
        console.print("OUTPUT DIFFERS between plain and speculative decoding", style="bold red")


def _rounded(*values: Any) -> list[Any]:
    return [None if value is None else round(value, 3) for value in values]


def run(console: Console) -> Result:
    return asyncio.run(demo(console, time.monotonic()))
