"""`DraftClient` over the network: a pool of draft workers, one frame per worker and step.

This is the engine's end. It decides which worker drafts for which request, and writes the frames. The links are in
another process, on an event loop (`draft_pool`); between them runs the engine's pipe.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftUpdates
from paceline.ipc.pipe import Pipe
from paceline.v1 import draft_pb2 as pb
from paceline.wire.draft_codec import encode_commit, encode_context, encode_limit, encode_opening
from paceline.wire.session_messages import ConnectDrafts, SendDraftFrame, SessionDown, SessionUp, SessionUpdate


@dataclass(slots=True)
class _SessionRequests:
    """A worker that is up, and whose requests, by their ids on the wire, it drafts for."""

    up: SessionUp
    requests: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _DraftAssignment:
    """Where a request is drafted, and its id there."""

    session: _SessionRequests
    wire_id: int


class RemoteDrafting:
    """Draft workers that the engine reaches through its pipe."""

    concurrent = True

    def __init__(self, pipe: Pipe, clock: Callable[[], float] = time.monotonic) -> None:
        self.hidden_state_layers: Sequence[int] = ()
        """What the workers ask for; `DraftPool` sees to it that those that are up agree."""
        self._pipe = pipe
        self._clock = clock
        self._sessions: dict[int, _SessionRequests] = {}
        self._next_id = 1
        self._assignments: dict[int, _DraftAssignment] = {}
        self._dropped_by: defaultdict[int, set[str]] = defaultdict(set)
        self._frames: dict[int, pb.DraftFrame] = {}
        self._updates = DraftUpdates()
        pipe.on(SessionUp, self._on_session_up)
        pipe.on(SessionUpdate, self._on_session_update)
        pipe.on(SessionDown, self._on_session_down)

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """See `DraftClient.open`. A worker that dropped this request before is passed over."""
        self._close_draft(opening.request_id, pb.DraftFrame.CLOSE_REASON_MOVED)
        session = self._pick(drafts, self._dropped_by.get(opening.request_id, ()))
        if session is None:
            return None
        route = self._assignments[opening.request_id] = _DraftAssignment(session, self._next_id)
        self._next_id += 1
        session.requests[route.wire_id] = opening.request_id
        self._frame(session).opens.append(encode_opening(opening, route.wire_id))
        return session.up.worker_id

    def context(self, context: Context) -> None:
        route = self._assignments.get(context.request_id)
        if route and route.session.up.hidden_state_layers:
            self._frame(route.session).contexts.append(encode_context(context, route.wire_id))

    def commit(self, commit: Commit) -> None:
        if route := self._assignments.get(commit.request_id):
            if commit.hidden_states is not None and not route.session.up.hidden_state_layers:
                commit = replace(commit, hidden_states=None)
            self._frame(route.session).commits.append(encode_commit(commit, route.wire_id))

    def limit(self, limit: Limit) -> None:
        if route := self._assignments.get(limit.request_id):
            self._frame(route.session).limits.append(encode_limit(limit, route.wire_id))

    def close(self, request_id: int) -> None:
        self._close_draft(request_id, pb.DraftFrame.CLOSE_REASON_FINISHED)
        self._dropped_by.pop(request_id, None)

    def flush(self) -> None:
        frames, self._frames = self._frames, {}
        for number, frame in frames.items():
            self._pipe.send(SendDraftFrame(number, frame))

    def poll(self, timeout_s: float) -> DraftUpdates:
        """Raises `PipeClosedError`."""
        deadline = self._clock() + timeout_s
        self._pipe.receive(0.0)
        while not self._updates and (left_s := deadline - self._clock()) > 0:
            self._pipe.receive(left_s)
        news, self._updates = self._updates, DraftUpdates()
        return news

    # What comes through the pipe. What concerns requests that were closed or moved is late, and dropped.

    def _on_session_up(self, up: SessionUp) -> None:
        self._sessions[up.session_id] = _SessionRequests(up)
        self.hidden_state_layers = up.hidden_state_layers or self.hidden_state_layers

    def _on_session_update(self, news: SessionUpdate) -> None:
        session = self._sessions[news.number]
        for wire_id, growth in news.update.growths:
            if (request_id := session.requests.get(wire_id)) is not None:
                self._updates.growths.append((request_id, growth))
        for wire_id in news.update.dropped:
            if (request_id := session.requests.get(wire_id)) is not None:
                self._dropped_by[request_id].add(session.up.address)
                self._drop(session, wire_id)

    def _on_session_down(self, down: SessionDown) -> None:
        session = self._sessions.pop(down.number)
        self._frames.pop(down.number, None)
        for wire_id in list(session.requests):
            self._drop(session, wire_id)

    def _drop(self, session: _SessionRequests, wire_id: int) -> None:
        request_id = session.requests.pop(wire_id)
        del self._assignments[request_id]
        self._updates.lost.append(request_id)

    def _pick(self, drafts: Sequence[str], unwanted: Collection[str]) -> _SessionRequests | None:
        up = {session.up.address: session for session in self._sessions.values()}
        if not up.keys() >= set(drafts):
            self._pipe.send(ConnectDrafts(drafts))
        return next((up[address] for address in drafts if address in up and address not in unwanted), None)

    def _close_draft(self, request_id: int, reason: pb.DraftFrame.CloseReason) -> None:
        if route := self._assignments.pop(request_id, None):
            del route.session.requests[route.wire_id]
            close = pb.DraftFrame.Close(request_id=route.wire_id, reason=reason)
            self._frame(route.session).closes.append(close)

    def _frame(self, session: _SessionRequests) -> pb.DraftFrame:
        """What this step has to say to this worker so far."""
        return self._frames.setdefault(session.up.session_id, pb.DraftFrame())
