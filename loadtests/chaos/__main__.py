"""`python -m loadtests.chaos`: kill processes at random under load, count what clients lost, print one JSON line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import deque
from typing import Annotated, Any

import typer

from loadtests.chaos import chaos_run as chaos
from loadtests.chaos.chaos_stack import running
from paceline import family
from paceline.cli.options import EngineName, VllmSettings
from paceline.launcher import StartError

LAST_LINES = 200
EVERY_S, VLLM_EVERY_S = 2.0, 15.0
"""Mean seconds between two faults; vLLM takes many seconds to start."""


def main(
    model: Annotated[str | None, typer.Option(help="The target: the timed model, or one that ships.")] = None,
    engine: Annotated[EngineName, typer.Option(help="What computes for the targets.")] = "paceline",
    vllm_options: VllmSettings = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of the run.")] = 300.0,
    every: Annotated[float | None, typer.Option(min=0.1, help="Mean seconds between two faults.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Length of an answer.")] = 300,
    seed: Annotated[int, typer.Option(help="Decides the schedule of faults.")] = 0,
    gateways: Annotated[int, typer.Option(min=2)] = 2,
    targets: Annotated[int, typer.Option(min=2)] = 3,
    drafts: Annotated[int, typer.Option(min=1)] = 2,
    verbose: Annotated[bool, typer.Option(help="Show what the services log.")] = False,  # noqa: FBT002 - typer's way
) -> None:
    """Exit code 1 if a token was lost or changed, a request failed, a worker was left with one, or nothing happened."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel("WARNING")
    if engine == "vllm":
        model, vllm, every = (
            model or family.NAMES[0],
            vllm_options or chaos.default_vllm_options(),
            every or VLLM_EVERY_S,
        )
    else:
        model, vllm, every = model or chaos.TARGET, None, every or EVERY_S
    options = chaos.ChaosOptions(seconds, every, clients, max_tokens, seed)
    output: deque[str] = deque(maxlen=None if verbose else LAST_LINES)

    async def whole() -> dict[str, Any]:
        log_line = (lambda line: print(line, file=sys.stderr)) if verbose else output.append  # noqa: T201
        async with running(chaos.chaos_deployment_options(model, targets, drafts, vllm), log_line, gateways) as stack:
            report = await chaos.run(stack, options)
        return {
            **report.summary(),
            "seconds": seconds,
            "seed": seed,
            "model": model,
            "engine": engine,
            "clean": report.clean and report.has_work,
        }

    try:
        summary = asyncio.run(whole())
    except StartError as error:
        sys.stderr.write("\n".join([*output, str(error), ""]))
        raise typer.Exit(2) from None
    if not summary["clean"]:
        sys.stderr.write("\n".join([*output, ""]))
    sys.stdout.write(json.dumps(summary) + "\n")
    raise typer.Exit(0 if summary["clean"] else 1)


if __name__ == "__main__":
    typer.run(main)
