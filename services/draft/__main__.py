"""python -m services.draft: one draft worker.

This process speaks: gRPC with targets, Redis, metrics. Its speculator runs in another one, `compute`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from paceline.compute.process import compute_process
from paceline.speculators.growing import Rounds, SpeculatorFacts
from paceline.state import WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.v1 import draft_pb2
from paceline.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.wire.channels import draft_frame_bytes
from paceline.wire.credentials import TARGET
from paceline.wire.draft_frames import DraftDescription
from paceline.wire.server import Server
from services.draft.servicer import DraftServicer
from services.process import begun, either, exported, parsed, parser, run
from services.security import add_tls, certificates

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("draft", options.worker_id, options.log_level.upper())
    return run(lambda stop: serve(options, stop))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    known = parser("draft", "Grows trees of guesses for target workers.")
    known.add_argument("--target-model", metavar="MODEL", help="what it drafts for; methods made for one model need it")
    add_tls(known)
    options = parsed(known, arguments)
    if not options.speculative_config.enabled:
        known.error('--speculative-config is needed, with a method or a model, such as {"method": "ngram"}')
    return options


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From starting the speculator's process to the last word on every link."""
    tls = certificates(options)
    async with AsyncExitStack() as stack:
        compute = await stack.enter_async_context(compute_process("services.draft.compute", options))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        facts = await begun(compute, stop)
        assert isinstance(facts, SpeculatorFacts)
        metrics = CollectorRegistry()
        series = DraftMetrics(metrics, facts.method)
        servicer = DraftServicer(options.worker_id, facts, compute.connection.send)
        series.follow(lambda: servicer.open_requests, lambda: servicer.target_links)

        def grown(this: Rounds) -> None:
            for each in this.stats:
                series.observe_round(each)
            servicer.deliver(this.grown)

        compute.connection.deliver(Rounds, grown)
        most = draft_frame_bytes(hidden_states=bool(facts.hidden_state_layers))
        server = Server(options.host, options.port, tls=tls, peer=TARGET, receive_bytes=most)
        stack.enter_context(exported(metrics, options, server))
        server.add(add_DraftServiceServicer_to_server, servicer, DRAFT_SERVICE)
        stack.push_async_callback(server.stop)  # however this ends
        address = await server.start()
        record = registered_as(servicer.description, options.advertise or address)
        async with store.registration(record, lambda: {"requests": float(servicer.open_requests)}):
            log.info("draft ready on %s", address)
            await either(stop, compute.ended)
            await server.drain()
        servicer.drain()
        await server.stop(grace_s=1.0)
        if compute.ended.done():
            compute.ended.result()  # raises what is known of its end
    log.info("draft stopped")


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
