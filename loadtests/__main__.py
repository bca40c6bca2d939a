"""`python -m loadtests`: a bounded load against stacks that it starts.

Every stack is loaded twice, with speculation off and on. The last line of output is one JSON document. The exit code is
1 if an answer was an error, lost a token or had a changed one, if memory grew by more than
`loadtests.locust_process.FLAT`, if draft tokens were accepted with speculation off, or none with speculation on.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtests.load_profiles import PROFILES, LoadProfile, LoadRun
from loadtests.load_requests import Questions, TimedQuestions, record_questions
from loadtests.load_shapes import SHAPES
from loadtests.locust_process import run_locust
from paceline.cli.deployment import LOOPBACK, free_ports, plan_deployment
from paceline.cli.http_client import open_client
from paceline.cli.options import start_errors
from paceline.model_names import is_fake_model
from paceline_lab.bench.measured_stack import ready_stack

SPECULATION = {"off": False, "on": True}


def main(
    profiles: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(PROFILES)}; all by default")] = None,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "soak",
    streams: Annotated[int | None, typer.Option(min=1, help="Most streams at once.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Length of the load, after all users have started.")
    ] = None,
    step_ms: Annotated[float | None, typer.Option(min=0.0, help="A step of the timed target.")] = None,
) -> None:
    """Load stacks of our own, with speculation off and on."""
    if unknown := set(profiles or ()) - set(PROFILES):
        raise typer.BadParameter(f"no profile is called {unknown.pop()}: choose from {', '.join(PROFILES)}")
    if shape not in SHAPES:
        raise typer.BadParameter(f"no shape is called {shape}: choose from {', '.join(SHAPES)}")
    chosen = [changed(PROFILES[name], streams, seconds, step_ms) for name in profiles or PROFILES]
    console = Console(highlight=False)
    with start_errors():
        results = {profile.name: asyncio.run(load(console, profile, shape)) for profile in chosen}
    good = all(each["good"] for runs in results.values() for each in runs.values())
    typer.echo(json.dumps({"good": good, **results}))
    raise typer.Exit(0 if good else 1)


def changed(profile: LoadProfile, streams: int | None, seconds: float | None, step_ms: float | None) -> LoadProfile:
    """The profile with these options of the command line."""
    options = profile.deployment_options
    if step_ms is not None and is_fake_model(options.model):
        options = replace(options, model=f"{options.model},step_ms={step_ms:g}")
    return replace(
        profile, deployment_options=options, streams=streams or profile.streams, seconds=seconds or profile.seconds
    )


async def load(console: Console, profile: LoadProfile, shape: str) -> dict[str, dict[str, Any]]:
    """Load one stack with speculation off, then on."""
    deployment = replace(plan_deployment(profile.deployment_options), grpc_port=free_ports(LOOPBACK, 0, 0)[0])
    async with ready_stack(deployment, console) as stack:
        if is_fake_model(deployment.model):
            questions: Questions = TimedQuestions(deployment.model, profile.answer_tokens)
        else:
            async with open_client(deployment.url) as client:
                questions = await record_questions(client)
        results = {}
        for switch, speculative in SPECULATION.items():
            grpc = f"{LOOPBACK}:{deployment.grpc_port}"
            run = LoadRun(deployment.url, grpc, profile, shape, speculative, questions)
            console.print(f"{profile.name}: {profile.streams} streams, speculation {switch}, {profile.seconds:g} s")
            services = {name: child.pid for name, child in stack.supervisor.children.items() if child.pid}
            results[switch] = await run_locust(run, services)
        show(console, results)
        return results


def show(console: Console, results: dict[str, dict[str, Any]]) -> None:
    table = Table("", *(f"speculation {switch}" for switch in results))
    names = next(iter(results.values()))["figures"]
    for name in names:
        table.add_row(name.replace("_", " "), *(f"{each['figures'][name]:,}" for each in results.values()))
    table.add_row("memory, MB", *(_memory(each["memory"]) for each in results.values()))
    table.add_row(
        "busiest", *(", ".join(f"{n} {c}" for n, c in list(each["cores"].items())[:3]) for each in results.values())
    )
    console.print(table)


def _memory(used: dict[str, float] | None) -> str:
    return f"{used['first_minute_mb']:,} → {used['last_minute_mb']:,}" if used else "-"


if __name__ == "__main__":
    typer.run(main)
