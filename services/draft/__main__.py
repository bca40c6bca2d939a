"""python -m services.draft: one draft worker."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import torch
from prometheus_client import CollectorRegistry

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.speculators import Speculator, build
from paceline.speculators.growing import GrowingLoop
from paceline.state import WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.v1 import draft_pb2
from paceline.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.wire.draft_frames import DraftDescription
from paceline.wire.server import Server
from services.draft.servicer import DraftServicer
from services.process import StartError, either, exported, parser, run

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("draft", options.worker_id)
    torch.set_num_threads(options.engine_config.threads)
    return run(lambda stop: serve(options, stop))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    return parser("draft", "Grows trees of guesses for target workers.").parse_args(arguments)


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From building the speculator to the last word on every link."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(options.redis_url))
        speculator = await asyncio.to_thread(load, options.speculative_config, options.engine_config)
        metrics = CollectorRegistry()
        series = DraftMetrics(metrics, speculator.method)
        growing = GrowingLoop(speculator, series.observe_round)
        servicer = DraftServicer(options.worker_id, speculator, growing)
        series.follow(lambda: servicer.open_requests, lambda: servicer.target_links)
        stack.enter_context(exported(metrics, options))
        server = Server(options.host, options.port)
        server.add(add_DraftServiceServicer_to_server, servicer, DRAFT_SERVICE)
        address = await server.start()
        growth = asyncio.create_task(asyncio.to_thread(growing.run), name="growing")
        stack.callback(growing.stop)  # however this ends: a thread that runs would keep the process alive
        record = registered_as(servicer.description, address)
        async with store.registration(record, lambda: {"requests": float(servicer.open_requests)}):
            log.info("draft ready on %s", address)
            await either(stop, growth)
            await server.drain()
        servicer.drain()
        await server.stop(grace_s=1.0)
        growing.stop()
        await growth
        log.info("draft stopped")


def load(speculation: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """Raises `StartError` with what to do."""
    if not speculation.enabled:
        raise StartError('--speculative-config: a draft worker needs a method, such as {"method": "ngram"}')
    try:
        return build(speculation, engine)
    except (ValueError, OSError) as error:
        raise StartError(f"the {speculation.method} speculator cannot be built: {error}") from error


def registered_as(description: DraftDescription, address: str) -> WorkerRecord:
    return WorkerRecord(
        kind="draft",
        worker_id=description.worker_id,
        address=address,
        model=description.model,
        method=description.method,
        fingerprint=description.vocabulary_fingerprint,
        started_at=time.time(),
    )


if __name__ == "__main__":
    sys.exit(main())
