"""A target worker for tests: the real servicer, engine loop and engine over a table model, in this event loop."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.policy.step_cost import RowCost
from paceline.drafting import build_lookups
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import EngineLoop, StepResult
from paceline.messages import Delta, GenerationRequest
from paceline.model import Model
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.tls import Certificates
from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.wire.draft_pool import DraftPool
from paceline.wire.draft_stream import DraftLinkConfig
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.remote_draft_client import RemoteDraftClient
from paceline.wire.target_link import TargetLink
from paceline_lab.fake_models.table_model import TableModel
from paceline_services.target.engine_process import model_facts
from paceline_services.target.target_servicer import TargetServicer
from paceline_services.target.target_worker import target_description
from tests.helpers.pipes import computing, joined
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.workers import pooled

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
VOCABULARY = 1000
SLOTS = 4096
FREE = RowCost([8, 256], [1.0, 1.001])
"""Rows cost nothing, so every node is verified."""
NEVER_ENDS = 4000
"""Tokens of a request that must not run to its end."""


@dataclass
class RequestLog:
    """Records what the servicer reports, in the place of a `StatLogger`."""

    deltas: list[Delta] = field(default_factory=list)

    def committed(self, delta: Delta) -> None:
        self.deltas.append(delta)


@dataclass
class TargetWorker:
    """A target worker in this process."""

    address: str
    servicer: TargetServicer
    server: GrpcServer
    engine: Engine
    requests: RequestLog
    pool: DraftPool
    engine_exited: asyncio.Future[None]


@asynccontextmanager
async def target_worker(
    speculation: SpeculativeConfig | None = None,
    model: Model | None = None,
    hang_s: float = PATIENCE_S,
    tracing: Tracing = NO_TRACING,
) -> AsyncIterator[TargetWorker]:
    """It uses no draft until its pool is connected to one, or a request names one. Model-free methods run in it."""
    model = model or TableModel(VOCABULARY, SLOTS, SLOTS)
    config = EngineConfig(slots=model.slots)
    async with joined() as (connection, pipe):
        drafting = RemoteDraftClient(pipe)
        speculation = speculation or SpeculativeConfig()
        lookups = [LocalDraftClient(each) for each in build_lookups(speculation)]
        engine = Engine(model, config, speculation, drafting, FREE, lookup_clients=lookups)
        requests = RequestLog()
        options = argparse.Namespace(worker_id="t", served_model_name="tested", labels=[])
        description = target_description(model_facts(engine, speculation), options)
        servicer = TargetServicer(description, requests, connection.send, tracing)
        connection.on(StepResult, lambda step: servicer.send_deltas(step.deltas, step.load))
        link_config = DraftLinkConfig(model.fingerprint, progress_timeout_s=hang_s)
        pool = pooled(connection, link_config, model.layers)
        server = GrpcServer("127.0.0.1", 0)
        server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer, TARGET_SERVICE)
        try:
            async with computing(connection, EngineLoop(engine, pipe).run) as exited:
                await server.start()
                try:
                    yield TargetWorker(server.address, servicer, server, engine, requests, pool, exited)
                finally:
                    await server.stop()
        finally:
            await pool.stop()
        engine.check_integrity()


@asynccontextmanager
async def link_to(address: str, tls: Certificates | None = None) -> AsyncIterator[TargetLink]:
    link = TargetLink(address, tls)
    try:
        await link.connect(timeout_s=20.0)
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def linked(*workers: TargetWorker) -> AsyncIterator[list[TargetLink]]:
    """A link to each worker. The same worker may be named several times."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(link_to(worker.address)) for worker in workers]


def generation_request(
    request_id: str = "r", *, max_tokens: int = 20, plain: bool = False, **fields: object
) -> GenerationRequest:
    """A request with a repetitive prompt, at temperature 0.8."""
    return GenerationRequest(
        request_id,
        [1, 2, 3, 4] * 3,
        SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=11),
        SpeculativeOptions(enabled=False if plain else None, report=True),
        **fields,  # type: ignore[arg-type]
    )


async def collect(link: TargetLink, generation_request: GenerationRequest) -> tuple[list[int], Delta]:
    """Return all tokens, and the last delta."""
    tokens: list[int] = []
    async with aclosing(link.submit(generation_request)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
            last = delta
    return tokens, last
