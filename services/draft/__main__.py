"""python -m paceline_services.draft: one draft worker.

This process serves gRPC to targets and metrics, and connects to Redis. Its speculator runs in a process of its own,
`speculator_process`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from paceline.telemetry import logs
from paceline_services.service_entrypoint import (
    parse_with_config_file,
    run_service,
    start_model_process,
    worker_parser,
)


def main() -> int:
    options = parse_options(sys.argv[1:])
    logs.configure("draft", options.worker_id, options.log_level.upper())
    return run_service(lambda stop: serve(options, stop))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = worker_parser("draft", "Grows trees of draft tokens for target workers.")
    parser.add_argument("--target-model", metavar="MODEL", help="the target's model; some methods need it")
    options = parse_with_config_file(parser, arguments)
    if not options.speculative_config.enabled:
        parser.error('--speculative-config is needed, with a method or a model, such as {"method": "ngram"}')
    return options


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    async with start_model_process("paceline_services.draft.speculator_process", options) as process:
        from paceline_services.draft.draft_worker import draft_worker
        from paceline_services.worker import serve_worker

        await serve_worker("draft", draft_worker, process, options, stop)


if __name__ == "__main__":
    sys.exit(main())
