"""`paceline demo`: the same tokens, sooner, in two acts.

Act one serves the shipped model at its own speed. Act two serves the *widened* family: the same model padded with zeros
to 188 million parameters (`paceline_lab.training.family.widened_family`), made into a temporary folder for this run.
The shipped model is so small that a draft has little to save; the widened one costs what a larger model costs.

Each act starts the whole stack, as `paceline serve` does for the shipped model, and asks it for code, act one for
answers to questions as well; one request at a time, greedy and at temperature 0.8. Each prompt is asked with
speculation and without it, on one engine, in turns, so that other load on the machine slows both alike. Tokens must be
equal. Speeds are medians over requests:

- `*_tokens_per_s` on the target's own clock, from a request's arrival to its last token, prompt included;
- `*_tokens_per_s_http` on the client's clock, which adds gateway, HTTP and event streams;
- `speedup` is the ratio of the two medians, `speedup_http` that of the other two;
- `acceptance_length` is the number of accepted tokens per verification, without the bonus token.

Each prompt is asked once before anything is measured, so both find it in the prefix cache.

Ctrl-C ends it with what was measured.

The last line is one JSON document. At its top are the figures of act one, under `widened` the same of act two:

- `workloads`: the speeds above;
- `identical`: whether plain and speculative tokens were equal for every prompt; at the top, of both acts;
- `outputs`, `same`: how many outputs were compared, one for each prompt and temperature, and how many were equal;
- `ready_s`: until requests are served, from the start of the command, in act two from when the weights are written;
- `rss_mb`: the proportional set size of the whole process tree after the act's measurements, in MB (10^6 bytes); memory
  that processes share is counted once. In act two that includes torch in this process, which made the weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.rule import Rule

from paceline import family
from paceline.cli.deployment import TARGET, DeploymentOptions, default_speculative_config, plan_deployment
from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.cli.local_stack import ready_stack
from paceline.cli.process_tree import tree_pss_mb
from paceline.cli.progress import progress
from paceline.cli.token_colours import LEGEND, TokenPainter, summary
from paceline_lab.bench.workloads import Workload, workloads

TEMPERATURES = (0.0, 0.8)
SEED = 7
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class DemoAct:
    """One stack and what it is asked. `repetitions`: of each prompt, plain and speculative each."""

    title: str
    intro: str
    wish: DeploymentOptions
    workloads: Sequence[Workload]
    repetitions: int


@dataclass(frozen=True, slots=True)
class DemoMeasurement:
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
class DemoFigures:
    """One act. The units are in the module's docstring."""

    identical: bool
    outputs: int
    same: int
    workloads: Sequence[DemoMeasurement]
    ready_s: float
    rss_mb: float | None


@dataclass(frozen=True, slots=True)
class DemoResult(DemoFigures):
    """Act one, with act two below it. `identical` is about both. None: it was not played."""

    widened: DemoFigures | None


@dataclass(slots=True)
class DemoRuns:
    """The answers of one workload at one temperature, by prompt and then by repetition."""

    workload: Workload
    temperature: float
    plain: list[list[HttpCompletion]] = field(default_factory=list)
    speculative: list[list[HttpCompletion]] = field(default_factory=list)

    @property
    def same(self) -> int:
        """Prompts to which all answers are equal."""
        return sum(
            len({tuple(answer.tokens) for answer in (*plain, *speculative)}) == 1
            for plain, speculative in zip(self.plain, self.speculative, strict=True)
        )

    @property
    def identical(self) -> bool:
        return self.same == len(self.plain)

    def measured(self) -> DemoMeasurement:
        plain = [answer for answers in self.plain for answer in answers]
        speculative = [answer for answers in self.speculative for answer in answers]
        own = [median(answer.tokens_per_s for answer in answers) for answers in (plain, speculative)]
        http = [median(answer.tokens_per_s_http for answer in answers) for answers in (plain, speculative)]
        return DemoMeasurement(
            self.workload.name,
            self.temperature,
            *_rounded(own[0], own[1], own[1] / own[0], acceptance_length(speculative)),
            *_rounded(http[0], http[1], http[1] / http[0]),
        )


def acceptance_length(answers: Sequence[HttpCompletion]) -> float:
    """Accepted tokens per verification, without the bonus token."""
    verifications = sum(answer.speculation["verifications"] for answer in answers)
    return float(sum(answer.speculation["accepted_tokens"] for answer in answers) / max(verifications, 1))


async def demo(console: Console, began: float) -> DemoResult:
    """Play both acts. `began`: when the command did, in seconds. Raises `ServiceStartError`, `StateError`."""
    one, whole = await play(console, _act_one(), began)
    two: DemoFigures | None = None
    if whole:
        with TemporaryDirectory(prefix="paceline-demo-") as folder:
            target = _widened_target(console, Path(folder))
            two, _ = await play(console, _act_two(target), time.monotonic())
    console.print(Rule(characters="═"), verdict([one] if two is None else [one, two]), style="bold")
    identical = one.identical and (two is None or two.identical)
    return DemoResult(identical, one.outputs, one.same, one.workloads, one.ready_s, one.rss_mb, two)


def verdict(acts: Sequence[DemoFigures]) -> str:
    """In words."""
    outputs, same = sum(act.outputs for act in acts), sum(act.same for act in acts)
    best = max((each.speedup for act in acts for each in act.workloads), default=1.0)
    return f"{same} of {outputs} outputs identical, up to {best:.1f} × sooner"


def _act_one() -> DemoAct:
    return DemoAct(
        "Act one: the shipped model",
        "The shipped model at its own speed: a pass takes so little time that guesses can save hardly any of it.",
        DeploymentOptions(),
        workloads(),
        repetitions=3,
    )


def _act_two(target: Path) -> DemoAct:
    """Code alone, and each prompt once: an answer takes several times as long as in act one."""
    return DemoAct(
        "Act two: the widened model",
        "The same model, padded with zeros to 188 million parameters in a temporary folder: the same words at the cost "
        "of a larger model, whose passes are worth saving.",
        DeploymentOptions(str(target), default_speculative_config(TARGET)),
        workloads()[:1],
        repetitions=1,
    )


def _widened_target(console: Console, folder: Path) -> Path:
    with console.status("making the widened model: 188 million parameters"):
        from paceline_lab.training.family.widened_family import write_target  # loads torch, which act one does without

        write_target(family.path(TARGET), target := folder / f"{TARGET}-wide")
    return target


async def play(console: Console, act: DemoAct, began: float) -> tuple[DemoFigures, bool]:
    """Start, show, measure and stop one stack; and whether that was done to the end. `began`: from when on `ready_s`
    counts."""
    runs: list[DemoRuns] = []
    whole = True
    console.print(Rule(f"[bold]{act.title}[/bold]", characters="═"))
    console.print(act.intro)
    async with ready_stack(plan_deployment(act.wish), console) as stack, open_client(stack.deployment.url) as client:
        ready_s = time.monotonic() - began
        console.print(f"ready after {ready_s:.1f} s ·", LEGEND)
        try:
            for workload, temperature in product(act.workloads, TEMPERATURES):
                runs.append(DemoRuns(workload, temperature))
                await _run(client, console, act, runs[-1])
        except asyncio.CancelledError:  # by Ctrl-C, the only one who does
            whole = False
            console.print("\n[yellow]stopped: what was measured so far counts[/yellow]")
        rss_mb = tree_pss_mb()
    runs = [run for run in runs if run.plain]
    outputs, same = sum(len(run.plain) for run in runs), sum(run.same for run in runs)
    figures = DemoFigures(same == outputs, outputs, same, [run.measured() for run in runs], *_rounded(ready_s, rss_mb))
    return figures, whole


async def _run(client: HttpClient, console: Console, act: DemoAct, runs: DemoRuns) -> None:
    """Show the first prompt's answer, then measure all of them, into `runs`."""
    workload, temperature = runs.workload, runs.temperature
    console.print(Rule(f"{workload.name}, temperature {temperature:g}"))
    sampling = {"temperature": temperature, "seed": SEED, "max_tokens": MAX_TOKENS}
    bodies = [body | sampling for body in workload.bodies]
    shown = await client.stream(workload.path, bodies[0], TokenPainter(console))
    console.print(f"\n\n[dim]{summary(shown)}[/dim]")
    with progress(console, "prompts, plain and speculative in turns", len(bodies)) as done:
        for body in bodies:
            await _measure(client, runs, body, act.repetitions)
            done()
    _print(console, runs)


async def _measure(client: HttpClient, runs: DemoRuns, body: dict[str, Any], repetitions: int) -> None:
    """Ask one prompt in turns, with speculation and without it."""
    plain, speculative = [], []
    await client.stream(runs.workload.path, body)
    for _ in range(repetitions):
        plain.append(await client.collect(runs.workload.path, body | {"speculative": False}))
        speculative.append(await client.collect(runs.workload.path, body))
    runs.plain.append(plain)
    runs.speculative.append(speculative)


def _print(console: Console, runs: DemoRuns) -> None:
    measured = runs.measured()
    console.print(
        f"plain {measured.plain_tokens_per_s:.0f} tokens/s, speculative {measured.speculative_tokens_per_s:.0f}: "
        f"[bold]{measured.speedup:.2f} ×[/bold] (over HTTP {measured.speedup_http:.2f} ×)"
    )
    if runs.identical:
        each = len(runs.plain[0]) + len(runs.speculative[0])
        console.print(f"identical output: {len(runs.plain)} prompts, {each} answers each", style="green")
    else:
        console.print("OUTPUT DIFFERS between plain and speculative decoding", style="bold red")


def _rounded(*values: Any) -> list[Any]:
    return [None if value is None else round(value, 3) for value in values]


def run(console: Console) -> DemoResult:
    return asyncio.run(demo(console, time.monotonic()))
