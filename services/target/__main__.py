"""python -m services.target: one target worker."""

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

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.messages import TargetDescription
from paceline.model import Model, load
from paceline.model.probe import row_cost
from paceline.state import Acceptance, StateLostError, Store, WorkerRecord, open_store
from paceline.telemetry import logs
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.v1 import target_pb2
from paceline.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire.drafting import RemoteDrafting
from paceline.wire.server import Server
from services.process import StartError, either, exported, parser, run
from services.target.bookkeeping import Bookkeeping
from services.target.drafts import opened_drafting
from services.target.servicer import TargetServicer

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("target", options.worker_id)
    torch.set_num_threads(options.engine_config.threads)
    return run(lambda stop: serve(options, stop))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    known = parser("target", "Decodes, and verifies what draft workers guess.")
    known.add_argument("--model", required=True, help="a folder, a shipped model's name, or table:SIZE")
    known.add_argument("--served-model-name", help="what clients call it; default: --model")
    known.add_argument("--drain-s", type=float, default=30.0, help="seconds for running requests to finish")
    return known.parse_args(arguments)


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """From loading the model to the last word on every link."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(options.redis_url))
        model = await asyncio.to_thread(load_model, options.model, options.engine_config)
        description = describe(model, options)
        engine, bookkeeping = await assemble(model, description, options, store, stack)
        servicer = TargetServicer(description, bookkeeping)
        decoder = servicer.decoder = EngineLoop(engine, servicer.deliver)
        server = Server(options.host, options.port)
        server.add(add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
        address = await server.start()
        decoder.start()
        stack.push_async_callback(asyncio.to_thread, decoder.stop, 0.0)
        ended = asyncio.wrap_future(decoder.ended)
        async with store.registration(registered_as(description, address), servicer.load_by_name):
            log.info("target ready on %s", address)
            await either(stop, ended)
            await server.drain()
        await servicer.drain(0.0 if ended.done() else options.drain_s)
        await server.stop(grace_s=1.0)
        if ended.done():
            ended.result()  # raises what ended the engine
        log.info("target stopped")


async def assemble(
    model: Model, description: TargetDescription, options: argparse.Namespace, store: Store, stack: AsyncExitStack
) -> tuple[Engine, Bookkeeping]:
    """The engine, who drafts for it, and who keeps its books. What has to be closed is left on `stack`."""
    config, speculation = options.engine_config, options.speculative_config
    metrics = CollectorRegistry()
    series = TargetMetrics(metrics, description.model, model.slots)
    series.set_rows_invariant(invariant=model.rows_invariant)
    stack.enter_context(exported(metrics, options))
    recorder = await stack.enter_async_context(store.recorder())
    bookkeeping = await stack.enter_async_context(Bookkeeping(description, recorder, series))
    drafting = await stack.enter_async_context(opened_drafting(speculation, config, model, store))
    if isinstance(drafting, RemoteDrafting):
        series.follow_links(lambda: len(drafting.connected))
    cost = await asyncio.to_thread(row_cost, model, config.max_num_batched_rows)
    engine = Engine(model, config, speculation, drafting, cost, bookkeeping.observe)
    known = await known_acceptance(store, description)
    for calibration in engine.calibrations.values():
        calibration.seed(known.bin_drafted, known.bin_accepted)
    return engine, bookkeeping


def load_model(name: str, config: EngineConfig) -> Model:
    """Raises `StartError` or `ModelNotFoundError` with what to do."""
    began = time.perf_counter()
    try:
        model = load(name, config)
    except (ValueError, OSError) as error:
        raise StartError(f"--model {name} cannot be loaded: {error}") from error
    log.info("model loaded", extra={"seconds": time.perf_counter() - began, "slots": model.slots})
    if not model.rows_invariant:
        log.warning("rows are not invariant on this machine: tokens may depend on what else is decoded")
    return model


def describe(model: Model, options: argparse.Namespace) -> TargetDescription:
    speculation = options.speculative_config
    return TargetDescription(
        worker_id=options.worker_id,
        model=options.served_model_name or options.model,
        vocabulary_fingerprint=model.fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_model_len=model.max_model_len,
        slots=model.slots,
        rows_invariant=model.rows_invariant,
        eos_token_ids=model.eos_token_ids,
        method=speculation.method if speculation.enabled else "",
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
    )


if __name__ == "__main__":
    sys.exit(main())
