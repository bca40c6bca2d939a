"""`TargetService`: links of gateways on one side, the engine on the other.

A gateway chooses request ids that are unique on its link; the engine knows them as "link/id". Deltas come back from
the engine once per step, and leave as one frame per link.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, TypeAlias

import grpc

from paceline.core.messages import Delta, EngineLoad, FinishReason, Submission, TargetDescription
from paceline.v1 import common_pb2, target_pb2_grpc
from paceline.v1 import target_pb2 as pb
from paceline.wire.bidi_stream import serve_bidi_stream
from paceline.wire.channels import FRAME_BYTES
from paceline.wire.link_errors import Congested, Draining, EngineDeadError, WireError
from paceline.wire.outbox import Outbox
from paceline.wire.target_codec import decode_submission, encode_delta, encode_load, encode_target_description

log = logging.getLogger(__name__)

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EngineClient(Protocol):
    """What the servicer needs of an engine. Answers come to `deliver`."""

    def submit(self, submission: Submission) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class RequestObserver(Protocol):
    """Hears of every request. Deltas carry the engine's name for it, submissions the gateway's."""

    def submitted(self, engine_id: str, submission: Submission) -> None: ...

    def committed(self, delta: Delta) -> None: ...

    def finished(self, engine_id: str) -> None: ...


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, description: TargetDescription, observer: RequestObserver, decoder: EngineClient) -> None:
        self.load = EngineLoad(0, 0, description.slots, 0, 0.0)
        """As of the engine's last step."""
        self._description = description
        self._observer = observer
        self._engine = decoder
        self._serial = count(1)
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
        link = _GatewayLink(next(self._serial))
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
                self._engine.cancel(engine_id)
                self._forget(engine_id)

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._owners)

    def load_metrics(self) -> Mapping[str, float]:
        """For the registry; gateways of other links route by it, and make none to a target that drains."""
        load = self.load
        told = {"running": load.running, "waiting": load.waiting, "free_slots": load.free_slots}
        return told | {"draining": float(self._draining)}

    def stop_accepting(self) -> None:
        """Take nothing new from now on, and say so on every link."""
        self._draining = True
        for link in self._links:
            link.put(pb.DeltaFrame(draining=True))

    def send_deltas(self, deltas: Sequence[Delta], load: EngineLoad) -> None:
        """What one engine step has to say."""
        self.load = load
        frames: defaultdict[_GatewayLink, pb.DeltaFrame] = defaultdict(pb.DeltaFrame)
        for delta in deltas:
            link = self._owners.get(delta.request_id)
            if link is None:
                continue  # its gateway went away a moment ago
            self._observer.committed(delta)
            if delta.finish_reason is None:
                delta.speculation = None  # gateways hear of it at the end
            else:
                self._forget(delta.request_id)
            frames[link].deltas.append(encode_delta(delta, link.request_id(delta.request_id)))
        for link, frame in frames.items():
            frame.load.CopyFrom(encode_load(load))
            link.put(frame)

    async def drain(self, limit_s: float, engine_ended: asyncio.Future[None]) -> None:
        """Take nothing new, let what runs finish for so many seconds, and hand over the rest; then end the links.

        Without its engine nothing will finish: every link breaks at once, and says why.
        """
        if not (self._draining or engine_ended.done()):
            self.stop_accepting()
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait((idle, engine_ended), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if engine_ended.done():
            self._draining = True
            for link in self._links:
                link.outbox.close(EngineDeadError("the engine has died"))
            return
        if self._owners:
            log.warning("%d requests are handed over", len(self._owners))
        for engine_id, link in list(self._owners.items()):
            self._engine.cancel(engine_id)
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
                self._engine.cancel(engine_id)

    def _submit(self, link: _GatewayLink, message: pb.SubmitFrame.Submit) -> None:
        """A request that cannot be decoded ends with an error of its own; only a reused id breaks the link."""
        engine_id = link.engine_id(message.request_id)
        if engine_id in link.running:
            raise WireError(f"submits.request_id: {message.request_id!r} is in use on this link")
        if self._draining:
            link.hand_over(message.request_id)
            return
        try:
            submission = decode_submission(message)
        except WireError as error:
            link.put_delta(Delta(engine_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._owners[engine_id] = link
        link.running.add(engine_id)
        self._idle.clear()
        self._observer.submitted(engine_id, submission)
        self._engine.submit(replace(submission, request_id=engine_id))

    def _forget(self, engine_id: str) -> None:
        self._owners.pop(engine_id).running.discard(engine_id)
        self._observer.finished(engine_id)
        if not self._owners:
            self._idle.set()


class _GatewayLink:
    """One gateway's stream."""

    def __init__(self, number: int) -> None:
        self.outbox = Outbox(pb.DeltaFrame, FRAME_BYTES)
        self.running: set[str] = set()
        """The engine's names of its requests."""
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
        """Tell the gateway to submit this request elsewhere."""
        delta = pb.DeltaFrame.Delta(request_id=request_id, finish_reason=common_pb2.FINISH_REASON_HANDED_OVER)
        self.put(pb.DeltaFrame(deltas=[delta]))
