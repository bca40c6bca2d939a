"""A gateway's end of the link to one target worker: many requests over one stream of frames.

    link = TargetLink("127.0.0.1:50051")
    description = await link.connect()
    async with aclosing(link.submit(request)) as deltas:
        async for delta in deltas:
            ...
    await link.close()

When a link breaks, every open request raises `TargetLost`; a request that the target hands over raises `HandedOver`. A
link does not reconnect: make a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import grpc

from paceline.messages import Delta, EngineLoad, GenerationRequest, TargetDescription
from paceline.tls import Certificates
from paceline.v1 import common_pb2, target_pb2_grpc
from paceline.v1 import target_pb2 as pb
from paceline.wire.channels import SUBMIT_FRAME_BYTES, TARGET, open_channel
from paceline.wire.link_errors import (
    Congested,
    HandedOver,
    NotSubmitted,
    ReplayElsewhere,
    TargetEngineDied,
    TargetLost,
    WireError,
)
from paceline.wire.outbox import Outbox
from paceline.wire.target_codec import decode_delta, decode_load, decode_target_description, encode_request

log = logging.getLogger(__name__)


class TargetLink:
    """One connection to a target. Use it from one event loop. Raises no grpc errors."""

    description: TargetDescription
    """The target as it describes itself. Set by `connect`."""

    def __init__(self, address: str, tls: Certificates | None = None) -> None:
        self.address = address
        self.load: EngineLoad | None = None
        """The target's load after the last step that produced deltas for this link; None before the first frame."""
        self.draining = False
        """The target takes no new requests and finishes the running ones."""
        self._channel = open_channel(address, tls=tls, peer=TARGET)
        self._stub = target_pb2_grpc.TargetServiceStub(self._channel)
        self._queues: dict[str, asyncio.Queue[Delta | ReplayElsewhere]] = {}
        self._outbox = Outbox(pb.SubmitFrame, SUBMIT_FRAME_BYTES)
        self._answered = asyncio.Event()
        """The first frame has come, or the link is lost."""
        self._lost = asyncio.Event()
        self._why_lost = ""
        self._reader: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the link is broken or closed. Make a new one if the registry still lists the worker."""
        return self._lost.is_set()

    async def connect(self, timeout_s: float = 5.0) -> TargetDescription:
        """Connect, and return the target's description when the target takes requests.

        Raises `TargetLost` if it does not answer in time, drains, or has lost its engine.
        """
        try:
            request = pb.TargetServiceDescribeRequest()
            self.description = decode_target_description(await self._stub.Describe(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise TargetLost(f"target {self.address} does not answer: {error.details()}") from None
        call = self._stub.Serve(self._outbox)
        self._reader = asyncio.create_task(self._read(call), name=f"receive from {self.address}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()
        except TimeoutError:
            self._lose(f"it sent nothing in {timeout_s:g} s")
        if self.lost:
            await self.close()
            raise TargetLost(f"target {self.address} takes no requests: {self._why_lost}")
        return self.description

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Run a request and yield its deltas; the last one has a finish reason.

        Leaving early (`aclose`, cancellation) cancels the request at the target. Raises `NotSubmitted` if the link is
        lost already, `TargetLost` if it breaks first, `HandedOver` if the target drains: submit the request to another
        target, with the tokens so far as `committed`. Raises `WireError` if a value does not fit the contract,
        `ValueError` if the request id is in use.
        """
        await self._outbox.wait_for_capacity()  # many large requests at once would break the link
        if request.request_id in self._queues:
            raise ValueError(f"request {request.request_id} already runs on this link")
        if self.lost:
            raise NotSubmitted(f"target {self.address} is lost")
        frame = pb.SubmitFrame(submits=[_encode_checked(request)])
        stream: asyncio.Queue[Delta | ReplayElsewhere] = asyncio.Queue()
        self._queues[request.request_id] = stream
        ended = False
        try:
            self._send(frame)
            while not ended:
                received = await stream.get()
                ended = isinstance(received, ReplayElsewhere) or received.finish_reason is not None
                if isinstance(received, ReplayElsewhere):
                    raise received
                yield received
        finally:
            if not ended:
                self.cancel(request.request_id)
            del self._queues[request.request_id]

    def cancel(self, request_id: str) -> None:
        """Cancel a request: its iterator ends with the finish reason CANCELLED."""
        if request_id in self._queues:
            self._send(pb.SubmitFrame(cancels=[pb.SubmitFrame.Cancel(request_id=request_id)]))

    async def wait_lost(self) -> None:
        """Return when the link is lost."""
        await self._lost.wait()

    async def close(self) -> None:
        """End the link; the target cancels its requests."""
        self._lose("closed by the gateway")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await self._channel.close(None)

    def _send(self, frame: pb.SubmitFrame) -> None:
        try:
            self._outbox.put(frame)
        except Congested as error:
            self._lose(str(error))

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.SubmitFrame, pb.DeltaFrame]) -> None:
        reason, kind = "the target ended the link", TargetLost
        try:
            async for frame in call:
                self._receive(frame)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            kind = TargetEngineDied if error.code() == grpc.StatusCode.ABORTED else TargetLost
        except WireError as error:
            reason = f"it broke the contract: {error}"
        except Exception as error:
            reason = f"this end failed: {error!r}"
            raise
        finally:
            self._lose(reason, kind)
            call.cancel()

    def _receive(self, frame: pb.DeltaFrame | None) -> None:
        if frame is None:  # gRPC could not parse it
            raise WireError("a message that is no DeltaFrame")
        self._answered.set()
        if frame.HasField("load"):
            self.load = decode_load(frame.load)
        if frame.draining and not self.draining:
            log.info("target %s drains", self.address)
            self.draining = True
        for message in frame.deltas:
            stream = self._queues.get(message.request_id)
            if stream is None:
                continue  # just cancelled
            if message.finish_reason == common_pb2.FINISH_REASON_HANDED_OVER:
                stream.put_nowait(HandedOver(f"target {self.address} drains and handed the request over"))
            else:
                stream.put_nowait(decode_delta(message))

    def _lose(self, reason: str, kind: type[TargetLost] = TargetLost) -> None:
        if self.lost:
            return
        self._why_lost = reason
        self._lost.set()
        self._answered.set()
        self._outbox.close()
        log.log(
            logging.WARNING if self._queues else logging.INFO,
            "link to target %s lost with %d requests open: %s",
            self.address,
            len(self._queues),
            reason,
        )
        for stream in self._queues.values():
            stream.put_nowait(kind(f"target {self.address} lost: {reason}"))


def _encode_checked(request: GenerationRequest) -> pb.SubmitFrame.Submit:
    """Raises `WireError` if the message may not fit into one frame together with waiting messages."""
    message = encode_request(request)
    if (size := message.ByteSize()) > SUBMIT_FRAME_BYTES // 2:
        raise WireError(f"request {request.request_id}: {size} bytes, the most is {SUBMIT_FRAME_BYTES // 2}")
    return message
