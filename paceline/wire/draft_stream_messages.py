"""Messages in the pipe between a target's engine and the event loop that holds its links to draft workers.

Those of every step are named tuples of plain values, which the pipe carries fastest (`pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.core.growth import GrowthBatch


@dataclass(frozen=True, slots=True)
class ConnectDrafts:
    """To the event loop: connect to the draft workers at these addresses."""

    addresses: Sequence[str]


class SendDraftFrame(NamedTuple):
    """To the event loop: send one step's frame on a stream."""

    stream_id: int
    frame: bytes
    """A serialised `DraftFrame`."""


@dataclass(frozen=True, slots=True)
class StreamUp:
    """To the engine: a draft worker is connected. `stream_id` is never reused."""

    stream_id: int
    address: str
    worker_id: str
    hidden_state_layers: Sequence[int]
    """Layers whose hidden states it needs: empty, or the same as for all other open streams that need any."""


class StreamUpdate(NamedTuple):
    """To the engine: a frame of a draft worker, decoded and checked. Its request ids are those on the link."""

    stream_id: int
    growths: GrowthBatch
    dropped: Collection[int]
    """Requests that the worker cannot draft for."""


@dataclass(frozen=True, slots=True)
class StreamDown:
    """To the engine: the stream has ended, and with it all its requests."""

    stream_id: int


StreamEvent: TypeAlias = StreamUp | StreamUpdate | StreamDown
StreamEventHandler: TypeAlias = Callable[[StreamEvent], None]
