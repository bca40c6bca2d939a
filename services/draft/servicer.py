"""`DraftService`: links of targets on one side, the growing loop on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc

from paceline.speculators.base import Commit, Context, Opening, Speculator
from paceline.speculators.growing import GrowingLoop, Grown, Said
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc
from paceline.wire.channels import GROWTH_FRAME_BYTES
from paceline.wire.draft_frames import DraftDescription, decode_frame, encode_description, encode_grown
from paceline.wire.errors import Congested, Draining, WireError
from paceline.wire.outbox import Outbox
from paceline.wire.streams import exchange

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Construct it on the event loop. The compute happens in the thread that runs `growing`."""

    def __init__(self, worker_id: str, speculator: Speculator, growing: GrowingLoop) -> None:
        self.description = DraftDescription(
            worker_id=worker_id,
            method=speculator.method,
            model=speculator.model,
            vocabulary_fingerprint=speculator.vocabulary_fingerprint,
            hidden_state_layers=speculator.hidden_state_layers,
            position_limit=speculator.position_limit,
        )
        self._vocabulary_size = speculator.vocabulary_size
        self._growing = growing
        self._links: set[_TargetLink] = set()
        self._draining = False

    @property
    def open_requests(self) -> int:
        """Requests that targets opened here and have not closed. Any thread."""
        return sum(len(link.open_requests) for link in list(self._links))

    @property
    def target_links(self) -> int:
        """Targets connected. Any thread."""
        return len(self._links)

    async def Describe(
        self, request: pb.DraftServiceDescribeRequest, context: ServicerContext
    ) -> pb.DraftServiceDescribeResponse:
        return encode_description(self.description)

    async def Grow(
        self, incoming: AsyncIterator[pb.DraftFrame], context: ServicerContext
    ) -> AsyncGenerator[pb.GrowthFrame]:
        if self._draining:
            raise Draining("this draft worker drains")
        link = _TargetLink(self._growing, len(self.description.hidden_state_layers), self._vocabulary_size)
        self._links.add(link)
        try:
            async for frame in exchange(incoming, link.take, link.outbox):
                yield frame
        finally:
            self._links.discard(link)
            link.leave()

    def drain(self) -> None:
        """End every link. Targets go on without guesses, or find them elsewhere; nobody loses a token."""
        self._draining = True
        for link in self._links:
            link.outbox.close(Draining("this draft worker drains"))


class _TargetLink:
    """One target's stream."""

    def __init__(self, growing: GrowingLoop, layers: int, vocabulary_size: int) -> None:
        self.outbox = Outbox(pb.GrowthFrame, GROWTH_FRAME_BYTES)
        self.open_requests: set[int] = set()
        self._layers = layers
        self._vocabulary_size = vocabulary_size
        self._last_id = 0
        self._event_loop = asyncio.get_running_loop()
        self._link = growing.attach(self._deliver)

    def take(self, frame: pb.DraftFrame) -> None:
        """Raises `WireError` for what this worker cannot be told."""
        said = decode_frame(frame)
        for each in said:
            self._check(each)
        self._link.say(said)

    def leave(self) -> None:
        self._link.leave()

    def _check(self, said: Said) -> None:
        if isinstance(said, Opening):
            if said.request_id <= self._last_id:
                raise WireError(f"opens.request_id: {said.request_id} is not higher than {self._last_id}")
            self._last_id = said.request_id
            self.open_requests.add(said.request_id)
            self._check_tokens(said.tokens)
        elif isinstance(said, Commit):
            self._check_tokens(said.tokens)
            if said.hidden_states is not None:
                self._check_layers(said.hidden_states.shape[1])
        elif isinstance(said, Context):
            self._check_layers(said.hidden_states.shape[1])
        else:
            self.open_requests.discard(said.request_id)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if self._vocabulary_size and max(tokens) >= self._vocabulary_size:
            raise WireError(f"token_ids: {max(tokens)} is outside the vocabulary of {self._vocabulary_size}")

    def _check_layers(self, layers: int) -> None:
        if layers != self._layers:
            raise WireError(f"hidden_states: {layers} layers; this worker asked for {self._layers}")

    def _deliver(self, grown: Grown) -> None:
        """On the growing thread."""
        self._event_loop.call_soon_threadsafe(self._put, grown)

    def _put(self, grown: Grown) -> None:
        self.open_requests.difference_update(grown.dropped)
        try:
            self.outbox.put(encode_grown(grown))
        except Congested as error:
            self.outbox.close(error)
