"""A draft worker around its speculator's process."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry

from paceline.drafting.draft_loop import DraftRounds
from paceline.drafting.speculator import DraftDescription
from paceline.ipc.model_process import ModelProcess
from paceline.state import StateStore, WorkerRecord, WorkerRegistration
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.tracing import Tracing
from paceline.tls import Certificates
from paceline.v1 import draft_pb2
from paceline.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.wire.channels import TARGET, draft_frame_bytes
from paceline_services.draft.draft_servicer import DraftServicer
from paceline_services.worker import Worker

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]


@asynccontextmanager
async def draft_worker(
    options: argparse.Namespace, process: ModelProcess, store: StateStore, tls: Certificates | None, tracing: Tracing
) -> AsyncIterator[Worker]:
    """Connect servicer and metrics to the speculator."""
    speculator = process.ready.result()
    assert isinstance(speculator, DraftDescription)
    draft = replace(speculator, worker_id=options.worker_id)
    registry = CollectorRegistry()
    metrics = DraftMetrics(registry, draft.method)
    servicer = DraftServicer(draft, process.connection.send, tracing)
    metrics.set_gauge_sources(lambda: servicer.open_requests, lambda: servicer.target_links)

    def on_rounds(rounds: DraftRounds) -> None:
        for stats in rounds.stats:
            metrics.observe_round(stats)
        servicer.send_growth(rounds.grown)

    process.connection.on(DraftRounds, on_rounds)

    async def drain(registration: WorkerRegistration) -> None:
        servicer.drain()

    yield Worker(
        servicer=servicer,
        register=add_DraftServiceServicer_to_server,
        service=DRAFT_SERVICE,
        peer=TARGET,
        receive_bytes=draft_frame_bytes(hidden_states=bool(draft.hidden_state_layers)),
        metrics=registry,
        record=partial(worker_record, draft),
        load=lambda: {"requests": float(servicer.open_requests)},
        drain=drain,
    )


def worker_record(draft: DraftDescription, address: str) -> WorkerRecord:
    model, method, fingerprint = draft.model, draft.method, draft.vocabulary_fingerprint
    return WorkerRecord("draft", draft.worker_id, address, model, method, fingerprint, started_at=time.time())
