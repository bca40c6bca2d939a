"""`DraftService`: passes messages between the links of targets and the draft loop."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from paceline.drafting.draft_loop import LinkClosed, LinkEvents, LinkUpdate, RequestClosed, RequestEvent
from paceline.drafting.speculator import Commit, Context, DraftDescription, Opening
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc
from paceline.wire.channels import GROWTH_FRAME_BYTES
from paceline.wire.draft_codec import decode_draft_frame, encode_draft_description, encode_growth_frame
from paceline.wire.link_errors import Congested, Draining, WireError
from paceline.wire.outbox import Outbox, serve_bidi_stream
from paceline_services.draft.draft_spans import DraftSpans

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SendToLoop: TypeAlias = Callable[[LinkEvents | LinkClosed], None]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, draft: DraftDescription, send: SendToLoop, tracing: Tracing = NO_TRACING) -> None:
        """`send` passes a message to the draft loop."""
        self._draft = draft
        self._send = send
        self._tracing = tracing
        self._numbers = itertools.count(1)
        self._links: dict[int, _TargetLink] = {}
        self._draining = False

    @property
    def open_requests(self) -> int:
        """Number of open requests. Any thread."""
        return sum(len(link.open_requests) for link in list(self._links.values()))

    @property
    def target_links(self) -> int:
        """Number of connected targets. Any thread."""
        return len(self._links)

    async def Describe(
        self, request: pb.DraftServiceDescribeRequest, context: ServicerContext
    ) -> pb.DraftServiceDescribeResponse:
        return encode_draft_description(self._draft)

    async def Grow(
        self, incoming: AsyncIterator[pb.DraftFrame], context: ServicerContext
    ) -> AsyncGenerator[pb.GrowthFrame]:
        if self._draining:
            raise Draining("this draft worker drains")
        number = next(self._numbers)
        spans = DraftSpans(self._tracing, self._draft) if self._tracing else None
        link = _TargetLink(number, len(self._draft.hidden_state_layers), self._send, spans)
        self._links[number] = link
        try:
            async with aclosing(serve_bidi_stream(incoming, link.receive, link.outbox)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            del self._links[number]
            self._send(LinkClosed(number))
            if spans is not None:
                spans.close()

    def send_growth(self, updates: Sequence[tuple[int, LinkUpdate]]) -> None:
        """Send each update of a round on its link, given by number."""
        for number, update in updates:
            if link := self._links.get(number):
                link.send(update)

    def drain(self) -> None:
        """End every link. Targets continue without this worker; no token is lost."""
        self._draining = True
        for link in self._links.values():
            link.outbox.close(Draining("this draft worker drains"))


class _TargetLink:
    """The stream of one target."""

    def __init__(self, number: int, layers: int, send: SendToLoop, spans: DraftSpans | None) -> None:
        self.outbox = Outbox(pb.GrowthFrame, GROWTH_FRAME_BYTES)
        self.open_requests: set[int] = set()
        self._number = number
        self._layers = layers
        self._send = send
        self._spans = spans
        self._last_request_id = 0

    def receive(self, frame: pb.DraftFrame) -> None:
        """Pass the events of a frame to the draft loop. Raises `WireError`."""
        if not self._layers and _has_hidden_states(frame):
            raise WireError("hidden_states: this worker asked for none")  # decoding them would import torch
        events = decode_draft_frame(frame)
        for event in events:
            self._check(event)
        if self._spans is not None:
            self._spans.receive(events)
        self._send(LinkEvents(self._number, events))

    def send(self, update: LinkUpdate) -> None:
        self.open_requests.difference_update(update.dropped)
        if self._spans is not None:
            self._spans.send(update)
        try:
            self.outbox.put(encode_growth_frame(update))
        except Congested as error:
            self.outbox.close(error)

    def _check(self, event: RequestEvent) -> None:
        """Check an event against the state of the link, and update it. Raises `WireError`."""
        if isinstance(event, Opening):
            if event.request_id <= self._last_request_id:
                raise WireError(f"opens.request_id: {event.request_id} is not higher than {self._last_request_id}")
            self._last_request_id = event.request_id
            self.open_requests.add(event.request_id)
        elif isinstance(event, Commit):
            if event.hidden_states is not None:
                self._check_layers(event.hidden_states.shape[1])
        elif isinstance(event, Context):
            self._check_layers(event.hidden_states.shape[1])
        elif isinstance(event, RequestClosed):
            self.open_requests.discard(event.request_id)

    def _check_layers(self, layers: int) -> None:
        if layers != self._layers:
            raise WireError(f"hidden_states: {layers} layers; this worker asked for {self._layers}")


def _has_hidden_states(frame: pb.DraftFrame) -> bool:
    return bool(frame.contexts) or any(commit.HasField("hidden_states") for commit in frame.commits)
