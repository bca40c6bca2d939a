"""Messages in the pipe between a target's engine and the event loop that holds its links to draft workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.drafting.draft_loop import DraftUpdate
from paceline.v1 import draft_pb2 as pb


@dataclass(frozen=True, slots=True)
class ConnectDrafts:
    """To the event loop: connect to the draft workers at these addresses."""

    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class SendDraftFrame:
    """To the event loop: send one step's frame on a session."""

    session_id: int
    frame: pb.DraftFrame


@dataclass(frozen=True, slots=True)
class SessionUp:
    """To the engine: a draft worker is connected. `session_id` is never reused."""

    session_id: int
    address: str
    worker_id: str
    hidden_state_layers: Sequence[int]
    """Layers whose hidden states it needs: empty, or the same as for all other open sessions that need any."""


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """To the engine: a frame of a draft worker, decoded and checked. Its request ids are those on the link."""

    session_id: int
    update: DraftUpdate


@dataclass(frozen=True, slots=True)
class SessionDown:
    """To the engine: the session has ended, and with it all its requests."""

    session_id: int


SessionEvent: TypeAlias = SessionUp | SessionUpdate | SessionDown
SessionEventHandler: TypeAlias = Callable[[SessionEvent], None]
