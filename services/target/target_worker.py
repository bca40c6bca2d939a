"""A target worker around its engine's process."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry

from paceline.engine.engine_loop import CalibrationCounts, StepResult
from paceline.ipc.model_process import ModelProcess
from paceline.messages import TargetDescription
from paceline.state import AcceptanceCounts, StateStore, StateUnavailableError, WorkerRecord, WorkerRegistration
from paceline.state.periodic_task import PeriodicTask
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.telemetry.tracing import Tracing
from paceline.tls import Certificates
from paceline.v1 import target_pb2
from paceline.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire.channels import GATEWAY, SUBMIT_FRAME_BYTES
from paceline.wire.draft_pool import DraftPool, draft_discovery
from paceline.wire.draft_stream import DraftLinkConfig
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame
from paceline_services.target.stat_logger import StatLogger
from paceline_services.target.target_servicer import TargetServicer
from paceline_services.worker import Worker

log = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 4
"""The watchdog counts checks, not seconds: an engine on a suspended machine does not hang."""


class EngineWatchdog(PeriodicTask):
    """Calls `abort` once if the engine is busy and makes no step for `timeout_s` seconds, while the context lasts."""

    def __init__(self, timeout_s: float, busy: Callable[[], bool], abort: Callable[[], None]) -> None:
        self.interval_s = timeout_s / CHECKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._busy = busy
        self._abort = abort
        self._checks_without_step = 0

    def reset(self) -> None:
        """The engine made a step."""
        self._checks_without_step = 0

    async def run_once(self) -> None:
        self._checks_without_step = self._checks_without_step + 1 if self._busy() else 0
        if self._checks_without_step == CHECKS_PER_TIMEOUT + 1:
            log.critical("the engine has requests and made no step for %g s: it is aborted", self._timeout_s)
            self._abort()


TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]


@asynccontextmanager
async def target_worker(
    options: argparse.Namespace, process: ModelProcess, store: StateStore, tls: Certificates | None, tracing: Tracing
) -> AsyncIterator[Worker]:
    """Connect servicer, statistics, watchdog and draft pool to the engine."""
    loaded = process.ready.result()
    assert isinstance(loaded, TargetDescription)
    description = target_description(loaded, options)
    engine, speculation = process.connection, options.speculative_config
    registry = CollectorRegistry()
    metrics = TargetMetrics(registry, description.model, description.slots)
    metrics.rows_invariant.set(description.rows_invariant)
    metrics.set_strategy(speculation.strategy)
    async with AsyncExitStack() as stack:
        recorder = await stack.enter_async_context(store.recorder())
        stats = await stack.enter_async_context(StatLogger(description, recorder, metrics))
        servicer = TargetServicer(description, stats, engine.send, tracing)
        watchdog = await stack.enter_async_context(EngineWatchdog(options.hang_s, lambda: servicer.busy, process.abort))

        def on_step(step: StepResult) -> None:
            watchdog.reset()
            stats.observe(step.stats)
            servicer.send_deltas(step.deltas, step.load)

        engine.on(StepResult, on_step)
        engine.send(await stored_calibration(store, description))
        if options.engine == "paceline" and speculation.enabled and speculation.draft_placement == "worker":
            pool = draft_pool(description, process, tls, metrics)
            await stack.enter_async_context(draft_discovery(pool, store))

        yield Worker(
            servicer=servicer,
            register=add_TargetServiceServicer_to_server,
            service=TARGET_SERVICE,
            peer=GATEWAY,
            receive_bytes=SUBMIT_FRAME_BYTES,
            metrics=registry,
            record=partial(worker_record, description),
            load=lambda: {"rows_per_s": description.rows_per_s, **servicer.load_metrics()},
            drain=partial(drain, servicer, process, options.drain_s),
        )


def draft_pool(
    description: TargetDescription, process: ModelProcess, tls: Certificates | None, metrics: TargetMetrics
) -> DraftPool:
    """The links to draft workers, which the engine uses by messages."""
    engine, config = process.connection, DraftLinkConfig(description.vocabulary_fingerprint, tls=tls)
    pool = DraftPool(config, engine.send, description.layers, metrics)
    engine.on(ConnectDrafts, pool.connect)
    engine.on(SendDraftFrame, pool.send)
    metrics.draft_links.set_function(lambda: len(pool.connected))
    return pool


def target_description(loaded: TargetDescription, options: argparse.Namespace) -> TargetDescription:
    """`loaded`: by the engine."""
    model = options.served_model_name or options.model
    return replace(loaded, worker_id=options.worker_id, model=model, labels=options.labels)


async def stored_calibration(store: StateStore, description: TargetDescription) -> CalibrationCounts:
    """What targets have recorded about this model and method; nothing if Redis is away."""
    known = AcceptanceCounts()
    with suppress(StateUnavailableError):
        known = await store.acceptance.acceptance(description.model, description.method or "none")
    return CalibrationCounts(known.cell_drafted, known.cell_accepted)


async def drain(
    servicer: TargetServicer, process: ModelProcess, seconds: float, registration: WorkerRegistration
) -> None:
    """Let the running requests end, while the engine lives."""
    if not process.exited.done():
        servicer.stop_accepting()
        await registration.run_once()  # gateways without a link read it in the registry
    await servicer.drain(seconds, process.exited)


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
