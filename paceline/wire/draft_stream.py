"""A target's end of one connection to a draft worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import grpc

from paceline.core.growth import GrowthBatch
from paceline.drafting.draft_loop import LinkUpdate
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.tls import Certificates
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc
from paceline.wire.channels import draft_frame_bytes
from paceline.wire.draft_codec import decode_growth_frame
from paceline.wire.draft_stream_messages import StreamEventHandler, StreamUp, StreamUpdate
from paceline.wire.link_errors import Congested, LinkError, WireError
from paceline.wire.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftLinkConfig:
    """What a target requires of its draft workers, and its timeouts."""

    vocabulary_fingerprint: str
    connect_timeout_s: float = 5.0
    progress_timeout_s: float = 10.0
    """A worker that has frames to apply and applies none for this long hangs."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    forget_after_s: float = 60.0
    """The pool gives an address up after this time without a stream, until a request names it again."""
    tls: Certificates | None = None
    """For mutual TLS. None: links are not encrypted."""
    hidden_state_layers: Sequence[int] | None = None
    """Layers whose hidden states the target can send, in this order; None: any that drafts ask for; empty: none."""


class WorkerHungError(LinkError):
    """The worker applies no frames."""


@dataclass(slots=True)
class GrowthQuota:
    """Bounds the growth that a worker may send for one open request.

    A tree holds at most `max_nodes` nodes, so after n commits an honest worker has sent at most (n + 1) * max_nodes.
    Without this bound a worker could flood the engine.
    """

    max_nodes: int
    commits: int = 0
    """Commits sent."""
    nodes_received: int = 0

    @property
    def nodes_left(self) -> int:
        return self.max_nodes * (self.commits + 1) - self.nodes_received

    def receive(self, nodes: int) -> None:
        """Count a growth; an empty one counts as 1 node. Raises `WireError` if it exceeds the quota."""
        self.nodes_received += max(nodes, 1)
        if self.nodes_left < 0:
            raise WireError(f"growths: {self.nodes_received} nodes, where a tree has {self.max_nodes}")


class DraftStream:
    """One stream to a draft worker."""

    def __init__(
        self, up: StreamUp, config: DraftLinkConfig, on_event: StreamEventHandler, metrics: TargetMetrics
    ) -> None:
        self.up = up
        self._config = config
        self._on_event = on_event
        self._metrics = metrics
        self._outbox = Outbox(
            pb.DraftFrame, draft_frame_bytes(hidden_states=bool(up.hidden_state_layers)), self._note_sent
        )
        self._quotas: dict[int, GrowthQuota] = {}
        """By request id on the link."""
        self._late_quota = 0
        """How much may still arrive for closed requests: their nodes left, and one drop for each."""
        self._last_id = 0
        """The highest request id sent."""
        self._applied = 0
        """Frames that the worker has applied."""
        self._sent_at: deque[float] = deque()
        """When each frame left that the worker has not applied yet."""
        self._congested: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, frame: pb.DraftFrame) -> None:
        """Send the frame, merged with others if the link is busy."""
        self._update_quotas(frame)
        try:
            self._outbox.put(frame)
        except Congested as error:
            if not self._congested.done():
                self._congested.set_exception(error)

    async def run(self, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        """Return when the worker ends the stream. Raises `LinkError` or `AioRpcError` when the link breaks."""
        call = stub.Grow(self._outbox)
        tasks = [asyncio.ensure_future(work) for work in (self._read(call), self._watch_progress(), self._congested)]
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

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.DraftFrame, pb.GrowthFrame]) -> None:
        async for frame in call:
            self._receive(frame)

    def _receive(self, frame: pb.GrowthFrame | None) -> None:
        """Check a frame and pass on what it has for open requests. Raises `WireError`."""
        if frame is None:  # gRPC could not parse it
            raise WireError("a message that is no GrowthFrame")
        self._metrics.received(frame.ByteSize())
        update = decode_growth_frame(frame)
        if not 0 <= update.applied - self._applied <= len(self._sent_at):
            raise WireError(f"applied: {update.applied} of {self._applied + len(self._sent_at)} frames sent")
        if not (update.applied > self._applied or update.growths or update.dropped):
            raise WireError("an empty frame")  # no quota bounds their number
        self._note_applied(update)
        for wire_id in (*(wire_id for wire_id, *_ in update.growths.headers), *update.dropped):
            if not 0 < wire_id <= self._last_id:
                raise WireError(f"request_id: {wire_id} was never opened")
        is_open = [self._count_growth(wire_id, nodes) for wire_id, _, _, nodes in update.growths.headers]
        growths = update.growths if all(is_open) else GrowthBatch.of(compress(update.growths, is_open))
        dropped = [wire_id for wire_id, reason in update.dropped.items() if self._drop(wire_id, reason)]
        if growths or dropped:
            self._on_event(StreamUpdate(self.up.stream_id, growths, dropped))

    def _note_sent(self, frame: pb.DraftFrame) -> None:
        self._metrics.sent(frame.ByteSize())
        self._sent_at.append(time.monotonic())

    def _note_applied(self, update: LinkUpdate) -> None:
        if update.applied > self._applied:
            sent_at = [self._sent_at.popleft() for _ in range(update.applied - self._applied)][-1]
            self._metrics.round_trip(max(0.0, time.monotonic() - sent_at - update.timings.total_s))
        self._applied = update.applied

    def _update_quotas(self, frame: pb.DraftFrame) -> None:
        for opened in frame.opens:
            self._quotas[opened.request_id] = GrowthQuota(opened.max_nodes)
            self._last_id = max(self._last_id, opened.request_id)
        for commit in frame.commits:
            if quota := self._quotas.get(commit.request_id):
                quota.commits += 1
        for limit in frame.limits:
            if quota := self._quotas.get(limit.request_id):
                quota.max_nodes = max(quota.max_nodes, limit.max_nodes)
        for close in frame.closes:
            self._close(close.request_id)

    def _close(self, wire_id: int) -> bool:
        """Forget a request. Returns whether it was open."""
        quota = self._quotas.pop(wire_id, None)
        if quota is not None:
            self._late_quota += quota.nodes_left + 1
        return quota is not None

    def _count_growth(self, wire_id: int, nodes: int) -> bool:
        """Count a growth against its quota. Returns whether the request is open. Raises `WireError`."""
        if quota := self._quotas.get(wire_id):
            quota.receive(nodes)
            return True
        self._count_late(nodes)
        return False

    def _drop(self, wire_id: int, reason: str) -> bool:
        """Close a request that the worker dropped. Returns whether it was open. Raises `WireError`."""
        if not self._close(wire_id):
            self._count_late(1)
            return False
        log.info("draft %s cannot draft for a request: %.200s", self.up.worker_id, reason)
        return True

    def _count_late(self, nodes: int) -> None:
        """Growth for a closed request is no error if it can have been under way. Raises `WireError` otherwise."""
        self._late_quota -= max(nodes, 1)
        if self._late_quota < 0:
            raise WireError("growths: more for closed requests than can have been under way")

    async def _watch_progress(self) -> None:
        while True:
            has_frames, applied = bool(self._sent_at), self._applied
            await asyncio.sleep(self._config.progress_timeout_s)
            if has_frames and applied == self._applied:
                raise WorkerHungError(f"it applied no frame for {self._config.progress_timeout_s:g} s")
