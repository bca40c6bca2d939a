"""`TargetService`: passes messages between the links of gateways and the engine.

A gateway chooses request ids that are unique on its link; the engine's ids are "link/id". The engine returns deltas
once per step, and each link gets them as one frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

import grpc

from paceline.engine.engine_loop import CancelRequest
from paceline.ipc.model_process import ModelProcessDiedError
from paceline.messages import Delta, EngineLoad, FinishReason, GenerationRequest, TargetDescription
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.v1 import common_pb2, target_pb2_grpc
from paceline.v1 import target_pb2 as pb
from paceline.wire.channels import FRAME_BYTES
from paceline.wire.link_errors import Congested, Draining, EngineDeadError, WireError
from paceline.wire.outbox import Outbox, serve_bidi_stream
from paceline.wire.target_codec import decode_request, encode_delta, encode_load, encode_target_description
from paceline_services.target.stat_logger import StatLogger
from paceline_services.target.target_spans import TargetSpans

log = logging.getLogger(__name__)

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    def __init__(
        self,
        description: TargetDescription,
        stats: StatLogger,
        send: Callable[[GenerationRequest | CancelRequest], None],
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`send` passes a message to the engine; `send_deltas` takes its answers."""
        self.load = EngineLoad(0, 0, description.slots, 0, 0.0)
        """As of the engine's last step."""
        self._description = description
        self._stats = stats
        self._send = send
        self._spans = TargetSpans(description, tracing)
        self._link_numbers = count(1)
        self._links: set[_GatewayLink] = set()
        self._owners: dict[str, _GatewayLink] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def Describe(
        self, request: pb.TargetServiceDescribeRequest, context: ServicerContext
    ) -> pb.TargetServiceDescribeResponse:
        return encode_target_description(self._description)

    async def Serve(
        self, incoming: AsyncIterator[pb.SubmitFrame], context: ServicerContext
    ) -> AsyncGenerator[pb.DeltaFrame]:
        if self._draining:
            raise Draining("this target drains")
        link = _GatewayLink(next(self._link_numbers))
        self._links.add(link)
        link.put(pb.DeltaFrame(load=encode_load(self.load)))
        try:
            async with aclosing(
                serve_bidi_stream(incoming, lambda frame: self._receive(link, frame), link.outbox)
            ) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._links.discard(link)
            for engine_id in list(link.running):
                self._send(CancelRequest(engine_id))
                self._forget(engine_id)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._owners)

    def load_metrics(self) -> Mapping[str, float]:
        """Return the load for the registry. Gateways route by it, and open no link to a target that drains."""
        return {
            "running": self.load.running,
            "waiting": self.load.waiting,
            "free_slots": self.load.free_slots,
            "draining": float(self._draining),
        }

    def stop_accepting(self) -> None:
        """Hand over new requests from now on, and announce it on every link."""
        self._draining = True
        for link in self._links:
            link.put(pb.DeltaFrame(draining=True))

    def send_deltas(self, deltas: Sequence[Delta], load: EngineLoad) -> None:
        """Send the deltas of one engine step, one frame per link. A step that computed a part of a prompt has none."""
        self.load = load
        frames: defaultdict[_GatewayLink, pb.DeltaFrame] = defaultdict(pb.DeltaFrame)
        for delta in deltas:
            link = self._owners.get(delta.request_id)
            if link is None:
                continue  # its gateway has just disconnected
            self._stats.committed(delta)
            if delta.finish_reason is not None:
                self._spans.finish(delta)
                self._forget(delta.request_id)
            frames[link].deltas.append(encode_delta(delta, link.request_id(delta.request_id)))
        for link, frame in frames.items():
            frame.load.CopyFrom(encode_load(load))
            link.put(frame)

    async def drain(self, timeout_s: float, engine_exited: asyncio.Future[None]) -> None:
        """Let running requests finish for up to `timeout_s` seconds, hand over the rest, and end the links.

        If the engine dies, every link ends at once.
        """
        if not (self._draining or engine_exited.done()):
            self.stop_accepting()
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait((idle, engine_exited), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if engine_exited.done():
            self._end_links(engine_exited.exception())
        else:
            self._hand_over()

    def _end_links(self, error: BaseException | None) -> None:
        """End every link: the engine has died. A request may be the cause, unless another process sent SIGKILL."""
        self._draining = True
        killed = isinstance(error, ModelProcessDiedError) and error.killed
        for link in self._links:
            link.outbox.close(None if killed else EngineDeadError("the engine has died"))

    def _hand_over(self) -> None:
        if self._owners:
            log.warning("%d requests are handed over", len(self._owners))
        for engine_id, link in list(self._owners.items()):
            self._send(CancelRequest(engine_id))
            self._forget(engine_id)
            link.hand_over(link.request_id(engine_id))
        for link in self._links:
            link.outbox.close()

    def _receive(self, link: _GatewayLink, frame: pb.SubmitFrame) -> None:
        for message in frame.submits:
            self._submit(link, message)
        for cancel in frame.cancels:
            engine_id = link.engine_id(cancel.request_id)
            if engine_id in link.running:
                self._send(CancelRequest(engine_id))

    def _submit(self, link: _GatewayLink, message: pb.SubmitFrame.Submit) -> None:
        """Submit a request. An invalid one ends with an error in its own delta. Raises `WireError` for an id in use."""
        engine_id = link.engine_id(message.request_id)
        if engine_id in link.running:
            raise WireError(f"submits.request_id: {message.request_id!r} is in use on this link")
        if self._draining:
            link.hand_over(message.request_id)
            return
        try:
            request = decode_request(message)
        except WireError as error:
            link.put_delta(Delta(engine_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._owners[engine_id] = link
        link.running.add(engine_id)
        self._idle.clear()
        trace_parent = self._spans.start(engine_id, request)
        self._send(replace(request, request_id=engine_id, trace_parent=trace_parent))

    def _forget(self, engine_id: str) -> None:
        self._owners.pop(engine_id).running.discard(engine_id)
        self._spans.abandon(engine_id)
        if not self._owners:
            self._idle.set()


class _GatewayLink:
    """The stream of one gateway."""

    def __init__(self, number: int) -> None:
        self.outbox = Outbox(pb.DeltaFrame, FRAME_BYTES)
        self.running: set[str] = set()
        """The engine's ids of its requests."""
        self._prefix = f"{number}/"

    def engine_id(self, request_id: str) -> str:
        return self._prefix + request_id

    def request_id(self, engine_id: str) -> str:
        return engine_id.removeprefix(self._prefix)

    def put(self, frame: pb.DeltaFrame) -> None:
        try:
            self.outbox.put(frame)
        except Congested as error:
            self.outbox.close(error)

    def put_delta(self, delta: Delta) -> None:
        self.put(pb.DeltaFrame(deltas=[encode_delta(delta, self.request_id(delta.request_id))]))

    def hand_over(self, request_id: str) -> None:
        """Ask the gateway to submit this request to another target."""
        delta = pb.DeltaFrame.Delta(request_id=request_id, finish_reason=common_pb2.FINISH_REASON_HANDED_OVER)
        self.put(pb.DeltaFrame(deltas=[delta]))
