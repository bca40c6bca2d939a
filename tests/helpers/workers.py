"""Draft workers and drafting for tests: the real servicer, loop and links, over sockets, in the test's event loop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.draft_loop import DraftLoop, DraftRounds, SpeculatorFacts
from paceline.drafting.speculator import Commit, Context, DraftError, Opening, Speculator
from paceline.engine.draft_client import DraftUpdates
from paceline.ipc.model_process import PipeConnection
from paceline.tls import Certificates
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.credentials import TARGET
from paceline.wire.draft_link import DraftLinkConfig, LinkObserver, NullLinkObserver
from paceline.wire.draft_pool import DraftPool
from paceline.wire.grpc_server import GrpcServer
from paceline.wire.remote_drafting import RemoteDrafting
from paceline.wire.session_messages import ConnectDrafts, SendDraftFrame
from paceline_services.draft.draft_servicer import DraftServicer
from tests.helpers.pipes import computing, joined

VOCABULARY = 1000
FINGERPRINT = "v1"
LAYERS = 2
"""Of the target; hidden states are counted from 0 to one more."""
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
PATIENCE_S = 120.0
"""How long a test waits for what must happen. Only a test that fails waits that long."""


class Counting(Speculator):
    """Guesses that every token is followed by its successor. One node per request and round."""

    method = "custom"
    vocabulary_fingerprint = FINGERPRINT

    def __init__(self, longest: int = 0, vocabulary_size: int = VOCABULARY) -> None:
        """It cannot draft for prompts over `longest` tokens; 0: any."""
        self.vocabulary_size = vocabulary_size
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
                node = tree.add(leaf, (tree.tokens[leaf] + 1) % self.vocabulary_size, -0.25)
                grown[request_id] = tree.growth([node])
        return grown


class Witness(Counting):
    """Asks for hidden states, and drafts only for requests of which it got every one, as a table model makes them.

    A table model's hidden states are a row's token and position; so it can tell that each belongs where it says.
    """

    vocabulary_fingerprint = ""
    hidden_state_layers = (0, 3)

    def __init__(self, vocabulary_size: int = VOCABULARY) -> None:
        super().__init__(vocabulary_size=vocabulary_size)
        self.seen: dict[int, dict[int, int]] = {}
        """By request: the token whose hidden states came, by position."""

    def open(self, opening: Opening) -> None:
        super().open(opening)
        self.seen[opening.request_id] = {}

    def context(self, context: Context) -> None:
        self._take(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.hidden_states is None:
            raise DraftError("a commit without hidden states")
        self._take(commit.request_id, commit.base_position, commit.hidden_states)
        super().commit(commit)

    def grow(self) -> dict[int, Growth]:
        complete = {key for key, tree in self._trees.items() if len(self.seen[key]) == tree.position}
        return {key: growth for key, growth in super().grow().items() if key in complete}

    def _take(self, request_id: int, base_position: int, states: torch.Tensor) -> None:
        for i, (first, second) in enumerate(states.tolist()):
            token, position = map(int, first)
            if first != second or position != base_position + i:
                raise DraftError(f"hidden states of position {position} came for {base_position + i}")
            self.seen[request_id][position] = token


def witness(speculation: SpeculativeConfig, engine: EngineConfig) -> Witness:
    """The factory for method `custom`."""
    return Witness()


def slow(speculation: SpeculativeConfig, engine: EngineConfig) -> Witness:
    """A factory that gets nowhere."""
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
    speculator: Speculator | None = None, worker_id: str = "one", tls: Certificates | None = None
) -> AsyncIterator[DraftWorker]:
    speculator = speculator or Counting()
    async with joined() as (connection, pipe):
        servicer = DraftServicer(worker_id, SpeculatorFacts.of(speculator), connection.send)
        connection.on(DraftRounds, lambda this: servicer.send_growth(this.grown))
        async with computing(connection, DraftLoop(speculator, pipe).run), serving(servicer, tls=tls) as server:
            yield DraftWorker(server.address, servicer, speculator, server)


@asynccontextmanager
async def serving(
    servicer: draft_pb2_grpc.DraftServiceServicer, port: int = 0, tls: Certificates | None = None
) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", port, tls=tls, peer=TARGET)
    server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, DRAFT_SERVICE)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass
class Target:
    """The engine's end, driven by the test in the place of an engine."""

    drafting: RemoteDrafting
    pool: DraftPool
    news: DraftUpdates = field(default_factory=DraftUpdates)

    async def reach(self, *addresses: str) -> None:
        """Wait until these workers are up."""
        self.pool.connect(ConnectDrafts(addresses))
        await until(lambda: set(addresses) <= set(self.connected))

    @property
    def connected(self) -> list[str]:
        """Addresses of the workers that are up, which the engine has heard by now."""
        self._hear(0.0)
        return self.pool.connected

    async def poll(self, enough: Callable[[DraftUpdates], bool]) -> DraftUpdates:
        """Poll until what came since the last call is enough."""
        async with asyncio.timeout(PATIENCE_S):
            while not enough(self.news):
                await asyncio.to_thread(self._hear, 0.05)
        news, self.news = self.news, DraftUpdates()
        return news

    def _hear(self, timeout_s: float) -> None:
        more = self.drafting.poll(timeout_s)
        self.news.growths += more.growths
        self.news.lost += more.lost


@asynccontextmanager
async def target(
    hang_s: float = PATIENCE_S,
    observer: LinkObserver | None = None,
    tls: Certificates | None = None,
) -> AsyncIterator[Target]:
    async with joined() as (connection, pipe):
        drafting = RemoteDrafting(pipe)
        terms = DraftLinkConfig(FINGERPRINT, VOCABULARY, progress_timeout_s=hang_s, tls=tls)
        pool = pooled(connection, terms, LAYERS, observer or NullLinkObserver())
        try:
            yield Target(drafting, pool)
        finally:
            await pool.stop()


def pooled(
    connection: PipeConnection,
    terms: DraftLinkConfig,
    layers: int,
    observer: LinkObserver = NullLinkObserver(),  # noqa: B008 - it has no state
) -> DraftPool:
    """The links to draft workers of the engine at the other end."""
    pool = DraftPool(terms, connection.send, layers, observer)
    connection.on(ConnectDrafts, pool.connect)
    connection.on(SendDraftFrame, pool.send)
    return pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def nodes(news: DraftUpdates, request_id: int) -> list[int]:
    """The tokens that were guessed for a request, in order of arrival."""
    return [token for key, growth in news.growths if key == request_id for token in growth.tokens]
