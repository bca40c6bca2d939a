"""`python -m loadtests.chaos`: kill at random under load, and count what clients lost. Last line: one JSON object."""

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
from paceline.cli.supervised_process import StartError
from paceline.state import StateError

LAST_LINES = 200


def main(
    model: Annotated[str, typer.Option(help="The target: the timed model, or `pydoc`.")] = chaos.TARGET,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long processes are struck.")] = 300.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two blows, on average.")] = 2.0,
    clients: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Length of an answer.")] = 300,
    seed: Annotated[int, typer.Option(help="Another one, another schedule.")] = 0,
    gateways: Annotated[int, typer.Option(min=2)] = 2,
    targets: Annotated[int, typer.Option(min=2)] = 3,
    drafts: Annotated[int, typer.Option(min=1)] = 2,
    verbose: Annotated[bool, typer.Option(help="Show what the services log.")] = False,  # noqa: FBT002 - typer's way
) -> None:
    """Exit code 1 if a token was lost or changed, a request failed, a worker was left with one, or nothing happened."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel("WARNING")
    plan = chaos.ChaosOptions(seconds, every, clients, max_tokens, seed)
    said: deque[str] = deque(maxlen=None if verbose else LAST_LINES)

    async def whole() -> dict[str, Any]:
        say = (lambda line: print(line, file=sys.stderr)) if verbose else said.append  # noqa: T201
        async with running(chaos.chaos_deployment_options(model, targets, drafts), say, gateways) as stack:
            tally = await chaos.run(stack, plan)
        return {
            **tally.summary(),
            "seconds": seconds,
            "seed": seed,
            "model": model,
            "clean": tally.clean and tally.has_work,
        }

    try:
        summary = asyncio.run(whole())
    except (StartError, StateError) as error:
        sys.stderr.write("\n".join([*said, str(error), ""]))
        raise typer.Exit(2) from None
    if not summary["clean"]:
        sys.stderr.write("\n".join([*said, ""]))
    sys.stdout.write(json.dumps(summary) + "\n")
    raise typer.Exit(0 if summary["clean"] else 1)


if __name__ == "__main__":
    typer.run(main)
