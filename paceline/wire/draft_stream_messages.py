"""Messages in the pipe between a target's engine and the event loop that holds its links to draft workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.drafting.draft_loop import LinkUpdate
from paceline.v1 import draft_pb2 as pb


@dataclass(frozen=True, slots=True)
class ConnectDrafts:
    """To the event loop: connect to the draft workers at these addresses."""

    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class SendDraftFrame:
    """To the event loop: send one step's frame on a stream."""

    stream_id: int
    frame: pb.DraftFrame


@dataclass(frozen=True, slots=True)
class StreamUp:
    """To the engine: a draft worker is connected. `stream_id` is never reused."""

    stream_id: int
    address: str
    worker_id: str
    hidden_state_layers: Sequence[int]
    """Layers whose hidden states it needs: empty, or the same as for all other open streams that need any."""


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """To the engine: a frame of a draft worker, decoded and checked. Its request ids are those on the link."""

    stream_id: int
    update: LinkUpdate


@dataclass(frozen=True, slots=True)
class StreamDown:
    """To the engine: the stream has ended, and with it all its requests."""

    stream_id: int


StreamEvent: TypeAlias = StreamUp | StreamUpdate | StreamDown
StreamEventHandler: TypeAlias = Callable[[StreamEvent], None]
