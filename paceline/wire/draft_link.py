"""A target's end of the link to one draft worker.

A `DraftLink` keeps trying to reach its address for as long as somebody may want it; a `DraftSession` is one time
that it succeeded. Both live on the event loop. The engine, which decides what to say and needs what comes in, is
told of sessions by their numbers; see `draft_pool` and `drafting`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import grpc

from paceline.core.growth import GrowthBatch
from paceline.drafting.draft_loop import DraftUpdate
from paceline.tls import Certificates
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc
from paceline.wire.channels import GROWTH_FRAME_BYTES, draft_frame_bytes, open_channel
from paceline.wire.credentials import DRAFT
from paceline.wire.draft_codec import DraftDescription, decode_draft_description, decode_growth_frame
from paceline.wire.link_errors import Congested, LinkError, WireError
from paceline.wire.outbox import Outbox
from paceline.wire.session_messages import SessionDown, SessionEventHandler, SessionUp, SessionUpdate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftLinkConfig:
    """What a target demands of a draft, and how long it is patient with one. Times in seconds."""

    vocabulary_fingerprint: str
    vocabulary_size: int
    connect_timeout_s: float = 5.0
    progress_timeout_s: float = 10.0
    """A worker that applies no frame for this long, with frames to apply, hangs."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    forget_after_s: float = 60.0
    """An address that was of no use for this long is forgotten, until a request names it again."""
    tls: Certificates | None = None
    """What both ends show each other. None: nothing, and links are in the clear."""


class LinkObserver(Protocol):
    """Told what passes over links. One for all links of a target."""

    def sent(self, size: int) -> None:
        """A frame of so many bytes left."""

    def received(self, size: int) -> None:
        """A frame of so many bytes came."""

    def round_trip(self, seconds: float) -> None:
        """A frame was answered after so long, without the time that the worker says it took: the network's share."""


class NullLinkObserver:
    """An observer who does not look."""

    def sent(self, size: int) -> None: ...

    def received(self, size: int) -> None: ...

    def round_trip(self, seconds: float) -> None: ...


WorkerCheck = Callable[[DraftDescription], None]
"""Raises `IncompatibleWorkerError` for a worker that is of no use."""


class IncompatibleWorkerError(LinkError):
    """The worker at this address is not one that this target can use."""


class WorkerHungError(LinkError):
    """The worker applies nothing."""


@dataclass(slots=True)
class GrowthQuota:
    """A request that is open on a session, and how much growth it may still bring.

    The worker keeps to `max_nodes` in a tree, so after n commits it has sent no more than n + 1 times as many.
    One that sends more would have the engine drown in news.
    """

    max_nodes: int
    commits: int = 0
    """Said so far."""
    nodes_received: int = 0
    """Nodes received."""

    @property
    def nodes_left(self) -> int:
        """Nodes that may still come."""
        return self.max_nodes * (self.commits + 1) - self.nodes_received

    def receive(self, nodes: int) -> None:
        """Raises `WireError` if that is more than was asked for."""
        self.nodes_received += max(nodes, 1)
        if self.nodes_left < 0:
            raise WireError(f"growths: {self.nodes_received} nodes, where a tree has {self.max_nodes}")


class DraftSession:
    """One connection to a draft worker, from its description to the end of the stream."""

    def __init__(
        self,
        number: int,
        description: DraftDescription,
        terms: DraftLinkConfig,
        tell: SessionEventHandler,
        observer: LinkObserver,
    ) -> None:
        self.number = number
        self.description = description
        self._terms = terms
        self._on_event = tell
        self._requests: dict[int, GrowthQuota] = {}
        self._late_quota = 0
        """What may still come of requests that are closed, in nodes; and each may be dropped once."""
        self._last_id = 0
        """The highest request id said; growth for a higher one is a lie."""
        self._applied = 0
        self._observer = observer
        most = draft_frame_bytes(hidden_states=bool(description.hidden_state_layers))
        self._outbox = Outbox(pb.DraftFrame, most, self._note_sent)
        self._sent_at: deque[float] = deque()
        """When the frames left that were not applied yet."""
        self._congested: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, frame: pb.DraftFrame) -> None:
        """Send this as soon as the link allows."""
        self._note(frame)
        try:
            self._outbox.put(frame)
        except Congested as error:
            if not self._congested.done():
                self._congested.set_exception(error)

    async def run(self, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        """Returns when the worker ends the stream; raises `LinkError` or `AioRpcError` when it breaks."""
        call = stub.Grow(self._outbox)
        tasks = [asyncio.ensure_future(work) for work in (self._receive(call), self._watch_progress(), self._congested)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._outbox.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.DraftFrame, pb.GrowthFrame]) -> None:
        async for frame in call:
            self._take(frame)

    def _take(self, frame: pb.GrowthFrame | None) -> None:
        if frame is None:  # gRPC's way of saying that the bytes were no such message
            raise WireError("a message that is no GrowthFrame")
        self._observer.received(frame.ByteSize())
        grown = decode_growth_frame(frame, self._terms.vocabulary_size)
        if not self._applied <= grown.applied <= self._outbox.frames_sent:
            raise WireError(f"applied: {grown.applied} of {self._outbox.frames_sent} frames sent")
        if not (grown.applied > self._applied or grown.growths or grown.dropped):
            raise WireError("a frame that says nothing")  # of these there could be any number
        self._note_applied(grown)
        for wire_id in (*(wire_id for wire_id, *_ in grown.growths.headers), *grown.dropped):
            if not 0 < wire_id <= self._last_id:
                raise WireError(f"request_id: {wire_id} was never opened")
        wanted = [self._is_open(wire_id, nodes) for wire_id, _, _, nodes in grown.growths.headers]
        growths = grown.growths if all(wanted) else GrowthBatch.of(compress(grown.growths, wanted))
        dropped = {wire_id: reason for wire_id, reason in grown.dropped.items() if self._drop(wire_id, reason)}
        news = DraftUpdate(growths, dropped)
        if news.growths or news.dropped:
            self._on_event(SessionUpdate(self.number, news))

    def _note_sent(self, frame: pb.DraftFrame) -> None:
        self._observer.sent(frame.ByteSize())
        self._sent_at.append(time.monotonic())

    def _note_applied(self, grown: DraftUpdate) -> None:
        if grown.applied > self._applied:
            left = [self._sent_at.popleft() for _ in range(grown.applied - self._applied)][-1]
            self._observer.round_trip(max(0.0, time.monotonic() - left - grown.timings.total_s))
        self._applied = grown.applied

    def _note(self, frame: pb.DraftFrame) -> None:
        """Keep the books that growth is checked against."""
        for opened in frame.opens:
            self._requests[opened.request_id] = GrowthQuota(opened.max_nodes)
            self._last_id = max(self._last_id, opened.request_id)
        for commit in frame.commits:
            if request := self._requests.get(commit.request_id):
                request.commits += 1
        for limit in frame.limits:
            if request := self._requests.get(limit.request_id):
                request.max_nodes = max(request.max_nodes, limit.max_nodes)
        for close in frame.closes:
            self._close(close.request_id)

    def _close(self, wire_id: int) -> bool:
        """Whether it was open."""
        request = self._requests.pop(wire_id, None)
        self._late_quota += request.nodes_left + 1 if request else 0
        return request is not None

    def _is_open(self, wire_id: int, nodes: int) -> bool:
        if request := self._requests.get(wire_id):
            request.receive(nodes)
            return True
        self._receive_late(nodes)
        return False

    def _drop(self, wire_id: int, reason: str) -> bool:
        if not self._close(wire_id):
            self._receive_late(1)
            return False
        log.info("draft %s cannot draft for a request: %.200s", self.description.worker_id, reason)
        return True

    def _receive_late(self, nodes: int) -> None:
        """Nobody's fault, as long as there is not too much. Raises `WireError` then."""
        self._late_quota -= max(nodes, 1)
        if self._late_quota < 0:
            raise WireError("growths: more for requests that are closed than can have been under way")

    async def _watch_progress(self) -> None:
        while True:
            taken, applied = self._outbox.frames_sent, self._applied
            await asyncio.sleep(self._terms.progress_timeout_s)
            if applied == self._applied < taken:
                raise WorkerHungError(f"it applied nothing for {self._terms.progress_timeout_s:g} s")


class DraftLink:
    """Reaches for one address, again and again."""

    def __init__(
        self,
        address: str,
        terms: DraftLinkConfig,
        admit: WorkerCheck,
        tell: SessionEventHandler,
        numbers: Iterator[int],
        observer: LinkObserver,
    ) -> None:
        self.address = address
        self.session: DraftSession | None = None
        """There while the link is up."""
        self._terms = terms
        self._admit = admit
        self._on_event = tell
        self._numbers = numbers
        self._observer = observer
        self._last_error = ""
        self._last_seen = 0.0

    async def run(self) -> None:
        """Returns when there was no session for `DraftLinkConfig.give_up_s`."""
        clock = asyncio.get_running_loop().time
        self._last_seen = clock()
        backoff_s = self._terms.min_backoff_s
        while clock() - self._last_seen < self._terms.forget_after_s:
            started = clock()
            await self._attempt()
            if (
                self._last_seen - started > self._terms.progress_timeout_s
            ):  # it worked for a while, so this is not how it always ends
                backoff_s = self._terms.min_backoff_s
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, self._terms.max_backoff_s)
        log.info("draft %s: given up after %g s", self.address, self._terms.forget_after_s)

    async def _attempt(self) -> None:
        """One session, from beginning to end, if the worker answers."""
        reason = "it ended the link"
        try:
            channel = open_channel(self.address, receive_bytes=GROWTH_FRAME_BYTES, tls=self._terms.tls, peer=DRAFT)
            async with channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                worker = await self._describe(stub)
                await self._run_session(
                    DraftSession(next(self._numbers), worker, self._terms, self._on_event, self._observer), stub
                )
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except LinkError as error:
            reason = str(error)
        if reason != self._last_error:  # once, not with every attempt
            log.warning("draft %s: %s", self.address, reason)
            self._last_error = reason

    async def _run_session(self, session: DraftSession, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        worker = session.description
        self.session = session
        self._on_event(SessionUp(session.number, self.address, worker.worker_id, tuple(worker.hidden_state_layers)))
        try:
            await session.run(stub)
        finally:
            self._last_seen = asyncio.get_running_loop().time()
            self.session = None
            self._on_event(SessionDown(session.number))

    async def _describe(self, stub: draft_pb2_grpc.DraftServiceStub) -> DraftDescription:
        request = pb.DraftServiceDescribeRequest()
        worker = decode_draft_description(await stub.Describe(request, timeout=self._terms.connect_timeout_s))
        self._admit(worker)
        log.info("draft %s at %s is up: %s %s", worker.worker_id, self.address, worker.method, worker.model)
        self._last_error = ""
        return worker
