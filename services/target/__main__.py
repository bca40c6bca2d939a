"""python -m services.target: one target worker.

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

from paceline.compute.process import Compute, Connection, compute_process
from paceline.engine.orders import Cancel, Hearsay, ModelFacts, Stepped
from paceline.messages import Submission, TargetDescription
from paceline.state import Acceptance, StateLostError, Store, WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.tls import Certificates
from paceline.v1 import target_pb2
from paceline.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.verify import strategy_of
from paceline.wire.channels import SUBMIT_FRAME_BYTES
from paceline.wire.credentials import GATEWAY
from paceline.wire.draft_link import Terms
from paceline.wire.draft_pool import DraftPool
from paceline.wire.server import Server
from paceline.wire.sessions import Reach, Say
from services.process import begun, either, exported, parsed, parser, run
from services.security import add_tls, certificates
from services.target.bookkeeping import Bookkeeping
from services.target.drafts import reached
from services.target.servicer import TargetServicer
from services.target.watchdog import Watchdog

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("target", options.worker_id, options.log_level.upper())
    return run(lambda stop: serve(options, stop))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    known = parser("target", "Decodes, and verifies what draft workers guess.")
    known.add_argument("--model", required=True, help="a folder, a shipped model's name, or table:SIZE")
    known.add_argument("--served-model-name", help="what clients call it; default: --model")
    known.add_argument("--drain-s", type=float, default=30.0, help="seconds for running requests to finish")
    known.add_argument("--hang-s", type=float, default=120.0, help="an engine without a step for so long is ended")
    add_tls(known)
    return parsed(known, arguments)


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From loading the model to the last word on every link."""
    tls = certificates(options)
    async with AsyncExitStack() as stack:
        compute = await stack.enter_async_context(compute_process("services.target.compute", options))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        facts = await begun(compute, stop)
        assert isinstance(facts, ModelFacts)
        description = describe(facts, options)
        metrics = CollectorRegistry()
        servicer = await assemble(facts, description, options, store, tls, compute, metrics, stack)
        server = Server(options.host, options.port, tls=tls, peer=GATEWAY, receive_bytes=SUBMIT_FRAME_BYTES)
        stack.enter_context(exported(metrics, options, server))
        server.add(add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
        stack.push_async_callback(server.stop)  # however this ends
        address = await server.start()
        record = registered_as(description, options.advertise or address)
        speed = {"rows_per_s": facts.rows_per_s}
        async with store.registration(record, lambda: {**speed, **servicer.load_by_name()}) as registration:
            log.info("target ready on %s", address, extra={"numerics": facts.numerics})
            await either(stop, compute.ended)
            await server.drain()
            if not compute.ended.done():
                servicer.refuse()
                await registration.once()  # gateways without a link learn it from the registry
            await servicer.drain(options.drain_s, compute.ended)
        await server.stop(grace_s=1.0)
        if compute.ended.done():
            compute.ended.result()  # raises what is known of its end
    log.info("target stopped")


class RemoteEngine:
    """The servicer's `Decoder`: the engine at the other end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def submit(self, submission: Submission) -> None:
        self._connection.send(submission)

    def cancel(self, request_id: str) -> None:
        self._connection.send(Cancel(request_id))


async def assemble(
    facts: ModelFacts,
    description: TargetDescription,
    options: argparse.Namespace,
    store: Store,
    tls: Certificates | None,
    compute: Compute,
    metrics: CollectorRegistry,
    stack: AsyncExitStack,
) -> TargetServicer:
    """Everything around the engine: books, links to drafts, the servicer. What has to be closed is left on `stack`."""
    series = TargetMetrics(metrics, description.model, facts.slots)
    series.set_rows_invariant(invariant=facts.rows_invariant)
    series.set_strategy(strategy_of(options.speculative_config))
    recorder = await stack.enter_async_context(store.recorder())
    bookkeeping = await stack.enter_async_context(Bookkeeping(description, recorder, series))
    servicer = TargetServicer(description, bookkeeping, RemoteEngine(compute.connection))
    watchdog = Watchdog(options.hang_s, lambda: servicer.busy, compute.process.kill)
    await stack.enter_async_context(watchdog)

    def stepped(step: Stepped) -> None:
        watchdog.stepped()
        bookkeeping.observe(step.stats)
        if step.deltas:
            servicer.deliver(step.deltas, step.load)

    compute.connection.deliver(Stepped, stepped)
    known = await known_acceptance(store, description)
    compute.connection.send(Hearsay(known.cell_drafted, known.cell_accepted))
    if options.speculative_config.enabled and options.speculative_config.draft_placement == "worker":
        terms = Terms(facts.fingerprint, facts.vocabulary_size, tls=tls)
        pool = DraftPool(terms, compute.connection.send, facts.layers, series)
        compute.connection.deliver(Reach, pool.reach)
        compute.connection.deliver(Say, pool.say)
        series.follow_links(lambda: len(pool.connected))
        await stack.enter_async_context(reached(pool, store))
    return servicer


def describe(facts: ModelFacts, options: argparse.Namespace) -> TargetDescription:
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


async def known_acceptance(store: Store, description: TargetDescription) -> Acceptance:
    """What targets learned before about this model and method; nothing if that is not to be had now."""
    try:
        return await store.acceptance.acceptance(description.model, description.method or "none")
    except StateLostError:
        return Acceptance()


def registered_as(description: TargetDescription, address: str) -> WorkerRecord:
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
