"""`paceline demo`: the same tokens, sooner, in two acts.

Act one serves a published model, or the one that is named, with the drafts that `paceline serve` gives it. Its answers
are edits of code, which repeat their prompts, and answers to questions, which do not. Act two serves the *widened*
family: the shipped model padded with zeros to 188 million parameters (`paceline_lab.training.family.widened_family`),
written to a temporary folder for this run, with its trained draft in a draft worker.

Each act starts the whole stack, as `paceline serve` does; one request at a time, greedy and at temperature 0.8. Each
prompt is decoded with speculation and without it, on one engine, in turns, so other load on the machine slows both
alike. Tokens must be equal. Suffix lookups keep no finished request. Speeds are medians over requests:

- `*_tokens_per_s` on the target's own clock, from a request's arrival to its last token, prompt included;
- `*_tokens_per_s_http` on the client's clock, which adds gateway, HTTP and event streams;
- `speedup` is the ratio of the two medians, `speedup_http` that of the other two;
- `acceptance_length` is the number of accepted tokens per verification, without the bonus token.

Each prompt is computed once before anything is measured, so both find it in the prefix cache.

Ctrl-C ends the demo with what was measured so far.

The last line is one JSON document. At its top are `model` and the figures of act one, under `widened` the same of act
two:

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
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.rule import Rule

from paceline import family
from paceline.cli.deployment import TARGET, DeploymentOptions, default_speculative_config, plan_deployment
from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.cli.progress import progress
from paceline.cli.token_colours import LEGEND, TokenPainter, served_summary
from paceline_lab.bench.bench_measurement import Measurement, results_kept_on_interrupt
from paceline_lab.bench.measured_stack import ready_stack, tree_pss_mb
from paceline_lab.bench.workloads import Workload, repetitive_workloads, workloads

TEMPERATURES = (0.0, 0.8)
SEED = 7


@dataclass(frozen=True, slots=True)
class DemoAct:
    """One stack and its requests."""

    title: str
    intro: str
    deployment: DeploymentOptions
    workloads: Sequence[Workload]
    max_tokens: int


@dataclass(slots=True)
class DemoTimes:
    """Plain or speculative decoding of one workload, on two clocks."""

    served: Measurement = field(default_factory=Measurement)
    http: Measurement = field(default_factory=Measurement)
    verifications: int = 0
    accepted_tokens: int = 0

    def add(self, prompt: int, completion: HttpCompletion) -> None:
        self.served.add(prompt, [completion.tokens], completion.timings["total_s"])
        self.http.add(prompt, [completion.tokens], completion.wall_s)
        self.verifications += completion.speculation["verifications"]
        self.accepted_tokens += completion.speculation["accepted_tokens"]


@dataclass(slots=True)
class DemoRuns:
    """The completions of one workload at one temperature."""

    workload: Workload
    temperature: float
    plain: DemoTimes = field(default_factory=DemoTimes)
    speculative: DemoTimes = field(default_factory=DemoTimes)

    @property
    def outputs(self) -> int:
        """Prompts that were decoded."""
        return len(self.plain.served.outputs)

    @property
    def same(self) -> int:
        """Prompts whose outputs are all equal."""
        return self.speculative.served.equal_prompts(self.plain.served)

    def row(self) -> dict[str, Any]:
        """The speeds of the module's docstring."""
        plain, speculative = self.plain.served.median_speed, self.speculative.served.median_speed
        plain_http, speculative_http = self.plain.http.median_speed, self.speculative.http.median_speed
        return {
            "name": self.workload.name,
            "temperature": self.temperature,
            "plain_tokens_per_s": round(plain, 3),
            "speculative_tokens_per_s": round(speculative, 3),
            "speedup": round(speculative / plain, 3),
            "acceptance_length": round(self.speculative.accepted_tokens / max(self.speculative.verifications, 1), 3),
            "plain_tokens_per_s_http": round(plain_http, 3),
            "speculative_tokens_per_s_http": round(speculative_http, 3),
            "speedup_http": round(speculative_http / plain_http, 3),
        }


@dataclass(slots=True)
class DemoFigures:
    """One act, as far as it was played."""

    runs: list[DemoRuns] = field(default_factory=list)
    ready_s: float | None = None
    rss_mb: float | None = None

    @property
    def measured(self) -> list[DemoRuns]:
        return [run for run in self.runs if run.outputs]

    @property
    def outputs(self) -> int:
        return sum(run.outputs for run in self.runs)

    @property
    def same(self) -> int:
        return sum(run.same for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        return {
            "identical": self.same == self.outputs,
            "outputs": self.outputs,
            "same": self.same,
            "workloads": [run.row() for run in self.measured],
            "ready_s": None if self.ready_s is None else round(self.ready_s, 3),
            "rss_mb": None if self.rss_mb is None else round(self.rss_mb, 3),
        }


def run(console: Console, model: str) -> dict[str, Any]:
    """Play both acts, the first with `model`; return the JSON document. Its `widened` is None without act two.

    Raises `StartError` or `StateError`.
    """
    began = time.monotonic()
    one, two = DemoFigures(), DemoFigures()
    with results_kept_on_interrupt(console), TemporaryDirectory(prefix="paceline-demo-") as folder:
        asyncio.run(play(console, _act_one(model), one, began))
        act_two = _act_two(_widened_target(console, Path(folder)))
        asyncio.run(play(console, act_two, two, time.monotonic()))
    acts = [one, two] if two.outputs else [one]
    console.print(Rule(characters="═"), verdict(acts), style="bold")
    identical = all(act.same == act.outputs for act in acts)
    widened = two.as_json() if two.outputs else None
    return {"model": model, **one.as_json(), "identical": identical, "widened": widened}


def verdict(acts: Sequence[DemoFigures]) -> str:
    """One line for the terminal."""
    outputs, same = sum(act.outputs for act in acts), sum(act.same for act in acts)
    best = max((run.row()["speedup"] for act in acts for run in act.measured), default=1.0)
    return f"{same} of {outputs} outputs identical, up to {best:.1f} × sooner"


def _act_one(model: str) -> DemoAct:
    speculation = default_speculative_config(model).model_copy(update={"suffix_decoding_max_cached_requests": 0})
    known = {each.name: each for each in (*repetitive_workloads(), *workloads())}
    return DemoAct(
        f"Act one: {model}",
        "Edits repeat their prompt, so most guesses are right. Answers to questions do not.",
        DeploymentOptions(model, speculation),
        [known["code editing"], known["question answering"]],
        max_tokens=48,
    )


def _act_two(target: Path) -> DemoAct:
    """Code alone, for which the shipped draft was trained."""
    return DemoAct(
        "Act two: the widened model",
        "The shipped model, padded with zeros to 188 million parameters in a temporary folder: the same words at the "
        "cost of a larger model. A small model, trained for it, drafts in a draft worker.",
        DeploymentOptions(str(target), default_speculative_config(TARGET)),
        workloads()[:1],
        max_tokens=64,
    )


def _widened_target(console: Console, folder: Path) -> Path:
    with console.status("making the widened model: 188 million parameters"):
        from paceline_lab.training.family.widened_family import write_target  # loads torch, which act one does without

        write_target(family.path(TARGET), target := folder / f"{TARGET}-wide")
    return target


async def play(console: Console, act: DemoAct, figures: DemoFigures, began: float) -> None:
    """Start, show, measure and stop one stack. `ready_s` counts from `began`. `figures` keeps what was measured before
    a cancellation."""
    console.print(Rule(f"[bold]{act.title}[/bold]", characters="═"))
    console.print(act.intro)
    deployment = plan_deployment(act.deployment)
    console.print(f"model: {deployment.served_model_name}, drafts: {deployment.drafts_named}")
    async with ready_stack(deployment, console) as stack, open_client(stack.deployment.url) as client:
        figures.ready_s = time.monotonic() - began
        console.print(f"ready after {figures.ready_s:.1f} s ·", LEGEND)
        try:
            for workload, temperature in product(act.workloads, TEMPERATURES):
                figures.runs.append(DemoRuns(workload, temperature))
                await _run(client, console, figures.runs[-1], act.max_tokens)
        finally:
            figures.rss_mb = tree_pss_mb()


async def _run(client: HttpClient, console: Console, runs: DemoRuns, max_tokens: int) -> None:
    """Show the first prompt's answer, then measure all prompts."""
    path, temperature = runs.workload.path, runs.temperature
    console.print(Rule(f"{runs.workload.name}, temperature {temperature:g}"))
    sampling = {"temperature": temperature, "seed": SEED, "max_tokens": max_tokens}
    bodies = [body | sampling for body in runs.workload.bodies]
    shown = await client.stream(path, bodies[0], TokenPainter(console))
    console.print(f"\n\n[dim]{served_summary(shown)}[/dim]")
    with progress(console, "prompts, plain and speculative in turns", len(bodies)) as done:
        for prompt, body in enumerate(bodies):
            await client.collect(path, body | {"max_tokens": 1})  # fills the prefix cache
            runs.plain.add(prompt, await client.collect(path, body | {"speculative": False}))
            runs.speculative.add(prompt, await client.collect(path, body))
            done()
    row = runs.row()
    console.print(
        f"plain {row['plain_tokens_per_s']:.0f} tokens/s, speculative {row['speculative_tokens_per_s']:.0f}: "
        f"[bold]{row['speedup']:.2f} ×[/bold] (over HTTP {row['speedup_http']:.2f} ×)"
    )
    if runs.same == runs.outputs:
        console.print(f"identical output: {runs.outputs} prompts, plain and speculative", style="green")
    else:
        console.print("OUTPUT DIFFERS between plain and speculative decoding", style="bold red")
