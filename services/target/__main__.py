"""python -m paceline_services.target: one target worker.

This process speaks: gRPC with gateways and drafts, Redis, metrics. Its engine runs in another one, `compute`.
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

from paceline.core.messages import Submission, TargetDescription
from paceline.core.verify import strategy_of
from paceline.engine.engine_messages import CalibrationSeed, CancelRequest, ModelInfo, StepResult
from paceline.ipc.model_process import ModelProcess, PipeConnection, model_process
from paceline.state import AcceptanceCounts, StateStore, StateUnavailableError, WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.tls import Certificates
from paceline.v1 import target_pb2
from paceline.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire.channels import SUBMIT_FRAME_BYTES
from paceline.wire.credentials import GATEWAY
from paceline.wire.draft_link import DraftLinkConfig
from paceline.wire.draft_pool import DraftPool
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.session_messages import ConnectDrafts, SendDraftFrame
from paceline_services.service_entrypoint import (
    metrics_endpoint,
    parse_with_config_file,
    run_service,
    service_parser,
    wait_until_ready,
    wait_until_stopped,
)
from paceline_services.target.draft_discovery import draft_discovery
from paceline_services.target.engine_watchdog import EngineWatchdog
from paceline_services.target.stat_logger import StatLogger
from paceline_services.target.target_servicer import TargetServicer
from paceline_services.tls_options import add_tls_options, service_certificates

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse_options(sys.argv[1:])
    logs.configure("target", options.worker_id, options.log_level.upper())
    return run_service(lambda stop: serve(options, stop))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    known = service_parser("target", "Decodes, and verifies what draft workers guess.")
    known.add_argument("--model", required=True, help="a folder, a shipped model's name, or table:SIZE")
    known.add_argument("--served-model-name", help="what clients call it; default: --model")
    known.add_argument("--drain-s", type=float, default=30.0, help="seconds for running requests to finish")
    known.add_argument("--hang-s", type=float, default=120.0, help="an engine without a step for so long is ended")
    add_tls_options(known)
    return parse_with_config_file(known, arguments)


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From loading the model to the last word on every link."""
    tls = service_certificates(options)
    async with AsyncExitStack() as stack:
        compute = await stack.enter_async_context(model_process("paceline_services.target.engine_process", options))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        facts = await wait_until_ready(compute, stop)
        assert isinstance(facts, ModelInfo)
        description = target_description(facts, options)
        metrics = CollectorRegistry()
        servicer = await build_servicer(facts, description, options, store, tls, compute, metrics, stack)
        server = GrpcServer(options.host, options.port, tls=tls, peer=GATEWAY, receive_bytes=SUBMIT_FRAME_BYTES)
        stack.enter_context(metrics_endpoint(metrics, options, server))
        server.add(add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
        stack.push_async_callback(server.stop)  # however this ends
        address = await server.start()
        record = worker_record(description, options.advertise or address)
        speed = {"rows_per_s": facts.rows_per_s}
        async with store.registration(record, lambda: {**speed, **servicer.load_metrics()}) as registration:
            log.info("target ready on %s", address, extra={"numerics": facts.numerics})
            await wait_until_stopped(stop, compute.exited)
            await server.drain()
            if not compute.exited.done():
                servicer.stop_accepting()
                await registration.run_once()  # gateways without a link learn it from the registry
            await servicer.drain(options.drain_s, compute.exited)
        await server.stop(grace_s=1.0)
        if compute.exited.done():
            compute.exited.result()  # raises what is known of its end
    log.info("target stopped")


class PipeEngineClient:
    """The servicer's `EngineClient`: the engine at the other end of the pipe."""

    def __init__(self, connection: PipeConnection) -> None:
        self._connection = connection

    def submit(self, submission: Submission) -> None:
        self._connection.send(submission)

    def cancel(self, request_id: str) -> None:
        self._connection.send(CancelRequest(request_id))


async def build_servicer(
    facts: ModelInfo,
    description: TargetDescription,
    options: argparse.Namespace,
    store: StateStore,
    tls: Certificates | None,
    compute: ModelProcess,
    metrics: CollectorRegistry,
    stack: AsyncExitStack,
) -> TargetServicer:
    """Everything around the engine: books, links to drafts, the servicer. What has to be closed is left on `stack`."""
    series = TargetMetrics(metrics, description.model, facts.slots)
    series.set_rows_invariant(invariant=facts.rows_invariant)
    series.set_strategy(strategy_of(options.speculative_config))
    recorder = await stack.enter_async_context(store.recorder())
    bookkeeping = await stack.enter_async_context(StatLogger(description, recorder, series))
    servicer = TargetServicer(description, bookkeeping, PipeEngineClient(compute.connection))
    watchdog = EngineWatchdog(options.hang_s, lambda: servicer.busy, compute.process.kill)
    await stack.enter_async_context(watchdog)

    def stepped(step: StepResult) -> None:
        watchdog.reset()
        bookkeeping.observe(step.stats)
        if step.deltas:
            servicer.send_deltas(step.deltas, step.load)

    compute.connection.on(StepResult, stepped)
    known = await stored_acceptance(store, description)
    compute.connection.send(CalibrationSeed(known.cell_drafted, known.cell_accepted))
    if options.speculative_config.enabled and options.speculative_config.draft_placement == "worker":
        terms = DraftLinkConfig(facts.fingerprint, facts.vocabulary_size, tls=tls)
        pool = DraftPool(terms, compute.connection.send, facts.layers, series)
        compute.connection.on(ConnectDrafts, pool.connect)
        compute.connection.on(SendDraftFrame, pool.send)
        series.set_link_count_source(lambda: len(pool.connected))
        await stack.enter_async_context(draft_discovery(pool, store))
    return servicer


def target_description(facts: ModelInfo, options: argparse.Namespace) -> TargetDescription:
    return TargetDescription(
        worker_id=options.worker_id,
        model=options.served_model_name or options.model,
        vocabulary_fingerprint=facts.fingerprint,
        vocabulary_size=facts.vocabulary_size,
        max_model_len=facts.max_model_len,
        slots=facts.slots,
        rows_invariant=facts.rows_invariant,
        eos_token_ids=facts.eos_token_ids,
        method=facts.method,
        numerics=facts.numerics,
    )


async def stored_acceptance(store: StateStore, description: TargetDescription) -> AcceptanceCounts:
    """What targets learned before about this model and method; nothing if that is not to be had now."""
    try:
        return await store.acceptance.acceptance(description.model, description.method or "none")
    except StateUnavailableError:
        return AcceptanceCounts()


def worker_record(description: TargetDescription, address: str) -> WorkerRecord:
    return WorkerRecord(
        kind="target",
        worker_id=description.worker_id,
        address=address,
        model=description.model,
        method=description.method,
        fingerprint=description.vocabulary_fingerprint,
        started_at=time.time(),
        numerics=description.numerics,
    )


if __name__ == "__main__":
    sys.exit(main())
