"""`python -m loadtests`: a bounded load against stacks that it starts itself, or against a server that runs.

Every stack is loaded twice, with speculation off and on. The last line of output is one JSON document. The exit code is
1 if an answer was an error, lacked a token or had another one, if memory grew (`loadtests.locust_process.FLAT`), or
if guesses were accepted where speculation is off, or none where it is on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtests.load_profiles import PROFILES, LoadProfile
from loadtests.load_run import LoadRun
from loadtests.load_shapes import SHAPES
from loadtests.locust_process import run_locust
from loadtests.recorded_answers import recorded
from paceline.cli.deployment import LOOPBACK, Deployment, free_ports, plan_deployment
from paceline.cli.http_client import open_client
from paceline.cli.local_stack import ready_stack
from paceline.cli.options import start_errors
from paceline.model_names import is_fake_model

WAYS = {"off": False, "on": True}
"""Speculation."""


def main(
    profiles: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(PROFILES)}; all by default")] = None,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "soak",
    streams: Annotated[int | None, typer.Option(min=1, help="At once, at most.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="After all users have come.")] = None,
    step_ms: Annotated[float | None, typer.Option(min=0.0, help="Of the timed target.")] = None,
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
    good = all(each["good"] for ways in results.values() for each in ways.values())
    typer.echo(json.dumps({"good": good, **results}))
    raise typer.Exit(0 if good else 1)


def changed(profile: LoadProfile, streams: int | None, seconds: float | None, step_ms: float | None) -> LoadProfile:
    wish = profile.deployment_options
    if step_ms is not None and is_fake_model(wish.model):
        wish = replace(wish, model=f"{wish.model},step_ms={step_ms:g}")
    return replace(
        profile, deployment_options=wish, streams=streams or profile.streams, seconds=seconds or profile.seconds
    )


async def load(console: Console, profile: LoadProfile, shape: str) -> dict[str, dict[str, Any]]:
    """Both ways, one after the other, on one stack."""
    deployment = replace(plan_deployment(profile.deployment_options), grpc_port=free_ports(LOOPBACK, 0, 0)[0])
    async with ready_stack(deployment, console) as stack:
        questions: dict[str, Sequence[dict[str, Any]]] = {}
        if not is_fake_model(deployment.model):
            async with open_client(deployment.url) as client:
                questions = await recorded(client)
        results = {}
        for way, speculative in WAYS.items():
            run = run_of(deployment, profile, shape, speculative, questions)
            console.print(f"{profile.name}: {profile.streams} streams, speculation {way}, {profile.seconds:g} s")
            services = {name: child.pid for name, child in stack.supervisor.children.items() if child.pid}
            results[way] = await run_locust(run, services)
        show(console, results)
        return results


def run_of(
    deployment: Deployment,
    profile: LoadProfile,
    shape: str,
    speculative: bool,
    questions: dict[str, Sequence[dict[str, Any]]],
) -> LoadRun:
    return LoadRun(
        url=deployment.url,
        grpc=f"{LOOPBACK}:{deployment.grpc_port}",
        model=deployment.model,
        speculative=speculative,
        shape=shape,
        ramp_s=profile.ramp_s,
        seconds=profile.seconds,
        users=profile.users,
        answer_tokens=profile.answer_tokens,
        goal=profile.goal,
        recorded=questions,
    )


def show(console: Console, results: dict[str, dict[str, Any]]) -> None:
    table = Table("", *(f"speculation {way}" for way in results))
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
