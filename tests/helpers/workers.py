"""Draft workers and a target's end for tests: the real servicer, draft loop and links, in the test's event loop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.draft_loop import DraftLoop, DraftRounds
from paceline.drafting.speculator import Commit, Context, DraftDescription, DraftError, Opening, Speculator
from paceline.engine.draft_client import PollResult
from paceline.ipc.model_process import PipeConnection
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.tls import Certificates
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.channels import TARGET
from paceline.wire.draft_pool import DraftPool
from paceline.wire.draft_stream import DraftLinkConfig
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.remote_draft_client import RemoteDraftClient
from paceline_services.draft.draft_servicer import DraftServicer
from tests.helpers.pipes import computing, joined
from tests.helpers.waiting import PATIENCE_S, until

VOCABULARY = 1000
FINGERPRINT = "v1"
LAYERS = 2
"""Layers of the target: hidden states have indices 0 to 3."""
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]


class Counting(Speculator):
    """Predicts that each token is followed by its successor. Adds one node per request and round."""

    def __init__(self, longest: int = 0, vocabulary_size: int = VOCABULARY) -> None:
        """`longest`: it cannot draft for longer prompts; 0: no limit."""
        self.description = DraftDescription("custom", "", FINGERPRINT, vocabulary_size)
        self._longest = longest
        self._openings: dict[int, Opening] = {}
        self._trees: dict[int, TokenTree] = {}

    def open(self, opening: Opening) -> None:
        if self._longest and len(opening.tokens) > self._longest:
            raise DraftError(f"longer than {self._longest}")
        self._openings[opening.request_id] = opening
        self._trees[opening.request_id] = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])

    def commit(self, commit: Commit) -> None:
        tree = self._trees[commit.request_id]
        if tree.position != commit.base_position:
            raise DraftError(f"the root is at {tree.position}, the commit at {commit.base_position}")
        tree.commit(commit.tokens)

    def close(self, request_id: int) -> None:
        self._openings.pop(request_id, None)
        self._trees.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        grown = {}
        for request_id, tree in self._trees.items():
            leaf = tree.size  # it is a chain
            if leaf < self._openings[request_id].max_depth:
                node = tree.add(leaf, (tree.tokens[leaf] + 1) % self.description.vocabulary_size, -0.25)
                grown[request_id] = tree.growth([node])
        return grown


class RecordingSpeculator(Counting):
    """Asks for hidden states, and drafts only for requests whose hidden states all arrived.

    A table model's hidden states are a row's token and position, so the speculator checks that each is in its place.
    """

    def __init__(self, vocabulary_size: int = VOCABULARY, layers: Sequence[int] = (0, 3)) -> None:
        super().__init__(vocabulary_size=vocabulary_size)
        self.description = replace(self.description, vocabulary_fingerprint="", hidden_state_layers=layers)
        self.seen: dict[int, dict[int, int]] = {}
        """By request: the token at each position whose hidden states arrived."""

    def open(self, opening: Opening) -> None:
        super().open(opening)
        self.seen[opening.request_id] = {}

    def context(self, context: Context) -> None:
        self._record(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.hidden_states is None:
            raise DraftError("a commit without hidden states")
        self._record(commit.request_id, commit.base_position, commit.hidden_states)
        super().commit(commit)

    def grow(self) -> dict[int, Growth]:
        complete = {key for key, tree in self._trees.items() if len(self.seen[key]) == tree.position}
        return {key: growth for key, growth in super().grow().items() if key in complete}

    def _record(self, request_id: int, base_position: int, states: torch.Tensor) -> None:
        for i, (first, second) in enumerate(states.tolist()):
            token, position = map(int, first)
            if first != second or position != base_position + i:
                raise DraftError(f"hidden states of position {position} came for {base_position + i}")
            self.seen[request_id][position] = token


def recording_speculator(speculation: SpeculativeConfig, engine: EngineConfig) -> RecordingSpeculator:
    """A factory for method `custom`."""
    return RecordingSpeculator()


def endless_loading(speculation: SpeculativeConfig, engine: EngineConfig) -> RecordingSpeculator:
    """A factory that never returns."""
    print("loading for ever", file=sys.stderr, flush=True)
    time.sleep(3600)
    raise AssertionError


def opening(request_id: int, *, tokens: list[int] | None = None, max_depth: int = 3) -> Opening:
    return Opening(request_id, tokens or [5, 6, 7], 0, SamplingParams(), max_depth, 8)


@dataclass
class DraftWorker:
    """A draft worker in this process."""

    address: str
    servicer: DraftServicer
    speculator: Speculator
    server: GrpcServer


@asynccontextmanager
async def draft_worker(
    speculator: Speculator | None = None,
    worker_id: str = "one",
    tls: Certificates | None = None,
    tracing: Tracing = NO_TRACING,
) -> AsyncIterator[DraftWorker]:
    speculator = speculator or Counting()
    async with joined() as (connection, pipe):
        servicer = DraftServicer(replace(speculator.description, worker_id=worker_id), connection.send, tracing)
        connection.on(DraftRounds, lambda rounds: servicer.send_growth(rounds.grown))
        server = GrpcServer("127.0.0.1", 0, tls=tls, peer=TARGET)
        server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, DRAFT_SERVICE)
        async with computing(connection, DraftLoop(speculator, pipe).run):
            await server.start()
            try:
                yield DraftWorker(server.address, servicer, speculator, server)
            finally:
                await server.stop()


@dataclass
class Target:
    """The engine's end, driven by the test instead of an engine."""

    drafting: RemoteDraftClient
    pool: DraftPool
    updates: PollResult = field(default_factory=PollResult)
    """Received and not yet returned by `poll`."""

    async def reach(self, *addresses: str) -> None:
        """Connect to these workers and wait until they are up."""
        self.pool.connect(ConnectDrafts(addresses))
        await until(lambda: set(addresses) <= set(self.connected))

    async def open(self, request_id: int, address: str, tokens: list[int] | None = None, max_depth: int = 3) -> str:
        """Connect to a worker, and open a request there. Returns the worker's id."""
        await self.reach(address)
        worker_id = self.drafting.open(opening(request_id, tokens=tokens, max_depth=max_depth), [address])
        assert worker_id is not None
        self.drafting.flush()
        return worker_id

    def commit(self, *fields: Any) -> None:
        """Send a `Commit` with these fields."""
        self.drafting.commit(Commit(*fields))
        self.drafting.flush()

    @property
    def connected(self) -> list[str]:
        """Addresses of the workers that are up, as the engine knows them."""
        self._poll(0.0)
        return self.pool.connected

    async def poll(self, enough: Callable[[PollResult], bool]) -> PollResult:
        """Poll until the updates since the last call are enough, and return them."""
        async with asyncio.timeout(PATIENCE_S):
            while not enough(self.updates):
                await asyncio.to_thread(self._poll, 0.05)
        updates, self.updates = self.updates, PollResult()
        return updates

    async def drafted(self, request_id: int, count: int = 3) -> list[int]:
        """Poll until so many draft tokens of a request have arrived, and return them."""
        return nodes(await self.poll(lambda updates: len(nodes(updates, request_id)) >= count), request_id)

    async def lost(self) -> list[int]:
        """Poll until requests are lost, and return their ids."""
        return (await self.poll(lambda updates: bool(updates.lost))).lost

    def _poll(self, timeout_s: float) -> None:
        more = self.drafting.poll(timeout_s)
        self.updates.growths += more.growths
        self.updates.lost += more.lost


@asynccontextmanager
async def target(
    hang_s: float = PATIENCE_S,
    metrics: TargetMetrics | None = None,
    tls: Certificates | None = None,
) -> AsyncIterator[Target]:
    async with joined() as (connection, pipe):
        drafting = RemoteDraftClient(pipe)
        config = DraftLinkConfig(FINGERPRINT, progress_timeout_s=hang_s, tls=tls)
        pool = pooled(connection, config, LAYERS, metrics)
        try:
            yield Target(drafting, pool)
        finally:
            await pool.stop()


def pooled(
    connection: PipeConnection,
    config: DraftLinkConfig,
    layers: int,
    metrics: TargetMetrics | None = None,
) -> DraftPool:
    """The draft pool of the engine at the other end of the pipe."""
    pool = DraftPool(config, connection.send, layers, metrics or LinkTraffic())
    connection.on(ConnectDrafts, pool.connect)
    connection.on(SendDraftFrame, pool.send)
    return pool


class LinkTraffic(TargetMetrics):
    """Counts what passes over the links of a target."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry(), "tested", 1)
        self.frames_sent = self.bytes_sent = self.bytes_received = 0
        self.round_trips: list[float] = []

    def sent(self, size: int) -> None:
        self.frames_sent += 1
        self.bytes_sent += size

    def received(self, size: int) -> None:
        self.bytes_received += size

    def round_trip(self, seconds: float) -> None:
        self.round_trips.append(seconds)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def nodes(updates: PollResult, request_id: int) -> list[int]:
    """The draft tokens of a request, in order of arrival."""
    return [token for key, growth in updates.growths if key == request_id for token in growth.tokens]
