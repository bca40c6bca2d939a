"""What a target's engine and its links to draft workers tell each other through the engine's pipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.drafting.draft_loop import DraftUpdate
from paceline.v1 import draft_pb2 as pb


@dataclass(frozen=True, slots=True)
class ConnectDrafts:
    """To the links: these addresses are wanted."""

    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class SendDraftFrame:
    """To the links: what a step has to say on a session."""

    session_id: int
    frame: pb.DraftFrame


@dataclass(frozen=True, slots=True)
class SessionUp:
    """To the engine: a draft worker can be asked. `number` names this session, and is never used again."""

    session_id: int
    address: str
    worker_id: str
    hidden_state_layers: Sequence[int]
    """Whose hidden states it asks for; the same as those of all other sessions that are up, or none."""


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """To the engine: what a worker sent, decoded and checked. Request ids are those of the wire."""

    number: int
    update: DraftUpdate


@dataclass(frozen=True, slots=True)
class SessionDown:
    """To the engine: the session has ended, and all that was open on it is lost."""

    number: int


SessionEvent: TypeAlias = SessionUp | SessionUpdate | SessionDown
SessionEventHandler: TypeAlias = Callable[[SessionEvent], None]
