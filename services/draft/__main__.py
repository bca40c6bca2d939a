"""python -m paceline_services.draft: one draft worker.

This process serves gRPC to targets and metrics, and connects to Redis. Its speculator runs in a process of its own,
`speculator_process`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from paceline.drafting.draft_loop import DraftRounds, SpeculatorFacts
from paceline.ipc.model_process import ModelProcess
from paceline.state import StateStore, WorkerRecord, WorkerRegistration
from paceline.telemetry import logs
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.tracing import Tracing
from paceline.tls import Certificates
from paceline.v1 import draft_pb2
from paceline.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.wire.channels import draft_frame_bytes
from paceline.wire.credentials import TARGET
from paceline_services.draft.draft_servicer import DraftServicer
from paceline_services.service_entrypoint import (
    Worker,
    parse_with_config_file,
    run_service,
    serve_worker,
    worker_parser,
)

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]


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
    await serve_worker("draft", "paceline_services.draft.speculator_process", draft_worker, options, stop)


@asynccontextmanager
async def draft_worker(
    options: argparse.Namespace, process: ModelProcess, store: StateStore, tls: Certificates | None, tracing: Tracing
) -> AsyncIterator[Worker]:
    """Connect servicer and metrics to the speculator."""
    facts = process.ready.result()
    assert isinstance(facts, SpeculatorFacts)
    registry = CollectorRegistry()
    metrics = DraftMetrics(registry, facts.method)
    servicer = DraftServicer(options.worker_id, facts, process.connection.send, tracing)
    metrics.set_gauge_sources(lambda: servicer.open_requests, lambda: servicer.target_links)

    def on_rounds(rounds: DraftRounds) -> None:
        for stats in rounds.stats:
            metrics.observe_round(stats)
        servicer.send_growth(rounds.grown)

    process.connection.on(DraftRounds, on_rounds)

    async def drain(registration: WorkerRegistration) -> None:
        servicer.drain()

    def record(address: str) -> WorkerRecord:
        return WorkerRecord(
            kind="draft",
            worker_id=options.worker_id,
            address=address,
            model=facts.model,
            method=facts.method,
            fingerprint=facts.vocabulary_fingerprint,
            started_at=time.time(),
        )

    yield Worker(
        servicer=servicer,
        register=add_DraftServiceServicer_to_server,
        service=DRAFT_SERVICE,
        peer=TARGET,
        receive_bytes=draft_frame_bytes(hidden_states=bool(facts.hidden_state_layers)),
        metrics=registry,
        record=record,
        load=lambda: {"requests": float(servicer.open_requests)},
        drain=drain,
    )


if __name__ == "__main__":
    sys.exit(main())
