"""python -m paceline_services.target: one target worker.

This process serves gRPC to gateways and metrics, and connects to drafts and Redis. Its engine runs in a process of its
own, `engine_process`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence

from paceline import __version__
from paceline.config.vllm_options import VllmOptions
from paceline.launcher import StartError
from paceline.target_features import parse_labels
from paceline.telemetry import logs
from paceline_services.service_entrypoint import (
    json_option,
    parse_with_config_file,
    run_service,
    start_model_process,
    worker_parser,
)

ENGINES = {
    "paceline": "paceline_services.target.engine_process",
    "vllm": "paceline_services.target.vllm_process",
}
"""The model process of each engine."""


def main() -> int:
    options = parse_options(sys.argv[1:])
    logs.configure("target", options.worker_id, options.log_level.upper())
    return run_service(lambda stop: serve(options, stop))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = worker_parser("target", "Decodes, and verifies the draft tokens of draft workers.")
    parser.add_argument("--model", required=True, help="a folder, a shipped model's name, or table:SIZE")
    parser.add_argument("--served-model-name", help="the model's name for clients; default: --model")
    parser.add_argument("--drain-s", type=float, default=30.0, help="seconds for running requests to finish")
    parser.add_argument(
        "--hang-s", type=float, default=120.0, help="seconds without a step before the engine is aborted"
    )
    parser.add_argument(
        "--labels", action="append", default=[], metavar="KEY=VALUE,...", help="what requests may ask for; repeatable"
    )
    parser.add_argument("--engine", choices=ENGINES, default="paceline", help="what computes")
    parser.add_argument(
        "--vllm-options", default="{}", metavar="JSON", type=json_option(VllmOptions), help="for --engine vllm"
    )
    options = parse_with_config_file(parser, arguments)
    if options.engine != "vllm" and options.vllm_options != VllmOptions():
        parser.error("--vllm-options is for --engine vllm")
    try:
        options.labels = sorted(parse_labels(",".join(options.labels)))
    except ValueError as error:
        parser.error(f"--labels: {error}")
    return options


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    python = options.vllm_options.python
    if python is not None:
        await check_version(python)
    async with start_model_process(ENGINES[options.engine], options, python or sys.executable) as process:
        from paceline_services.target.target_worker import target_worker
        from paceline_services.worker import serve_worker

        await serve_worker("target", target_worker, process, options, stop)


async def check_version(python: str) -> None:
    """Raises `StartError` unless the environment of this Python has our version of paceline."""
    command = (python, "-c", "import paceline; print(paceline.__version__)")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    output, errors = (each.decode(errors="replace").strip() for each in await process.communicate())
    if process.returncode:
        raise StartError(
            f"{python} cannot import paceline: {errors.splitlines()[-1] if errors else process.returncode}"
        )
    if output != __version__:
        raise StartError(f"{python} has paceline {output}, not {__version__}: both processes of a target need the same")


if __name__ == "__main__":
    sys.exit(main())
