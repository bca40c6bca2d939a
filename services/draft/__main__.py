"""python -m paceline_services.draft: one draft worker.

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

from paceline.drafting.draft_loop import DraftRounds, SpeculatorFacts
from paceline.ipc.model_process import model_process
from paceline.state import WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.v1 import draft_pb2
from paceline.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.wire.channels import draft_frame_bytes
from paceline.wire.credentials import TARGET
from paceline.wire.draft_codec import DraftDescription
from paceline.wire.grpc_server import GrpcServer
from paceline_services.draft.draft_servicer import DraftServicer
from paceline_services.service_entrypoint import (
    metrics_endpoint,
    parse_with_config_file,
    run_service,
    service_parser,
    wait_until_ready,
    wait_until_stopped,
)
from paceline_services.tls_options import add_tls_options, service_certificates

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse_options(sys.argv[1:])
    logs.configure("draft", options.worker_id, options.log_level.upper())
    return run_service(lambda stop: serve(options, stop))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    known = service_parser("draft", "Grows trees of guesses for target workers.")
    known.add_argument("--target-model", metavar="MODEL", help="what it drafts for; methods made for one model need it")
    add_tls_options(known)
    options = parse_with_config_file(known, arguments)
    if not options.speculative_config.enabled:
        known.error('--speculative-config is needed, with a method or a model, such as {"method": "ngram"}')
    return options


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From starting the speculator's process to the last word on every link."""
    tls = service_certificates(options)
    async with AsyncExitStack() as stack:
        compute = await stack.enter_async_context(model_process("paceline_services.draft.speculator_process", options))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        facts = await wait_until_ready(compute, stop)
        assert isinstance(facts, SpeculatorFacts)
        metrics = CollectorRegistry()
        series = DraftMetrics(metrics, facts.method)
        servicer = DraftServicer(options.worker_id, facts, compute.connection.send)
        series.set_gauge_sources(lambda: servicer.open_requests, lambda: servicer.target_links)

        def grown(this: DraftRounds) -> None:
            for each in this.stats:
                series.observe_round(each)
            servicer.send_growth(this.grown)

        compute.connection.on(DraftRounds, grown)
        most = draft_frame_bytes(hidden_states=bool(facts.hidden_state_layers))
        server = GrpcServer(options.host, options.port, tls=tls, peer=TARGET, receive_bytes=most)
        stack.enter_context(metrics_endpoint(metrics, options, server))
        server.add(add_DraftServiceServicer_to_server, servicer, DRAFT_SERVICE)
        stack.push_async_callback(server.stop)  # however this ends
        address = await server.start()
        record = worker_record(servicer.description, options.advertise or address)
        async with store.registration(record, lambda: {"requests": float(servicer.open_requests)}):
            log.info("draft ready on %s", address)
            await wait_until_stopped(stop, compute.exited)
            await server.drain()
        servicer.drain()
        await server.stop(grace_s=1.0)
        if compute.exited.done():
            compute.exited.result()  # raises what is known of its end
    log.info("draft stopped")


def worker_record(description: DraftDescription, address: str) -> WorkerRecord:
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
