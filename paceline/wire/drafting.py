"""`Drafting` over the network: a pool of draft workers, one frame per worker and step.

This is the engine's end. It decides which worker drafts for which request, and writes the frames. The links are in
another process, on an event loop (`draft_pool`); between them runs the engine's pipe.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from paceline.compute.pipe import Pipe
from paceline.engine.drafting import News
from paceline.speculators.base import Commit, Context, Limit, Opening
from paceline.v1 import draft_pb2 as pb
from paceline.wire.draft_frames import encode_commit, encode_context, encode_limit, encode_opening
from paceline.wire.sessions import Reach, Say, SessionDown, SessionNews, SessionUp


@dataclass(slots=True)
class _Session:
    """A worker that is up, and whose requests, by their ids on the wire, it drafts for."""

    up: SessionUp
    requests: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a request is drafted, and its id there."""

    session: _Session
    wire_id: int


class RemoteDrafting:
    """Draft workers that the engine reaches through its pipe."""

    concurrent = True

    def __init__(self, pipe: Pipe, clock: Callable[[], float] = time.monotonic) -> None:
        self.hidden_state_layers: Sequence[int] = ()
        """What the workers ask for; `DraftPool` sees to it that those that are up agree."""
        self._pipe = pipe
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._next_id = 1
        self._routes: dict[int, _Route] = {}
        self._dropped_by: defaultdict[int, set[str]] = defaultdict(set)
        self._frames: dict[int, pb.DraftFrame] = {}
        self._news = News()
        pipe.deliver(SessionUp, self._take_up)
        pipe.deliver(SessionNews, self._take_news)
        pipe.deliver(SessionDown, self._take_down)

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """See `Drafting.open`. A worker that dropped this request before is passed over."""
        self._leave(opening.request_id, pb.DraftFrame.CLOSE_REASON_MOVED)
        session = self._pick(drafts, self._dropped_by.get(opening.request_id, ()))
        if session is None:
            return None
        route = self._routes[opening.request_id] = _Route(session, self._next_id)
        self._next_id += 1
        session.requests[route.wire_id] = opening.request_id
        self._frame(session).opens.append(encode_opening(opening, route.wire_id))
        return session.up.worker_id

    def context(self, context: Context) -> None:
        route = self._routes.get(context.request_id)
        if route and route.session.up.hidden_state_layers:
            self._frame(route.session).contexts.append(encode_context(context, route.wire_id))

    def commit(self, commit: Commit) -> None:
        if route := self._routes.get(commit.request_id):
            if commit.hidden_states is not None and not route.session.up.hidden_state_layers:
                commit = replace(commit, hidden_states=None)
            self._frame(route.session).commits.append(encode_commit(commit, route.wire_id))

    def limit(self, limit: Limit) -> None:
        if route := self._routes.get(limit.request_id):
            self._frame(route.session).limits.append(encode_limit(limit, route.wire_id))

    def close(self, request_id: int) -> None:
        self._leave(request_id, pb.DraftFrame.CLOSE_REASON_FINISHED)
        self._dropped_by.pop(request_id, None)

    def flush(self) -> None:
        frames, self._frames = self._frames, {}
        for number, frame in frames.items():
            self._pipe.send(Say(number, frame))

    def poll(self, timeout_s: float) -> News:
        """Raises `PipeClosedError`."""
        deadline = self._clock() + timeout_s
        self._pipe.receive(0.0)
        while not self._news and (left_s := deadline - self._clock()) > 0:
            self._pipe.receive(left_s)
        news, self._news = self._news, News()
        return news

    # What comes through the pipe. What concerns requests that were closed or moved is late, and dropped.

    def _take_up(self, up: SessionUp) -> None:
        self._sessions[up.number] = _Session(up)
        self.hidden_state_layers = up.hidden_state_layers or self.hidden_state_layers

    def _take_news(self, news: SessionNews) -> None:
        session = self._sessions[news.number]
        for wire_id, growth in news.grown.growths:
            if (request_id := session.requests.get(wire_id)) is not None:
                self._news.grown.append((request_id, growth))
        for wire_id in news.grown.dropped:
            if (request_id := session.requests.get(wire_id)) is not None:
                self._dropped_by[request_id].add(session.up.address)
                self._lose(session, wire_id)

    def _take_down(self, down: SessionDown) -> None:
        session = self._sessions.pop(down.number)
        self._frames.pop(down.number, None)
        for wire_id in list(session.requests):
            self._lose(session, wire_id)

    def _lose(self, session: _Session, wire_id: int) -> None:
        request_id = session.requests.pop(wire_id)
        del self._routes[request_id]
        self._news.lost.append(request_id)

    def _pick(self, drafts: Sequence[str], unwanted: Collection[str]) -> _Session | None:
        up = {session.up.address: session for session in self._sessions.values()}
        if not up.keys() >= set(drafts):
            self._pipe.send(Reach(drafts))
        return next((up[address] for address in drafts if address in up and address not in unwanted), None)

    def _leave(self, request_id: int, reason: pb.DraftFrame.CloseReason) -> None:
        if route := self._routes.pop(request_id, None):
            del route.session.requests[route.wire_id]
            close = pb.DraftFrame.Close(request_id=route.wire_id, reason=reason)
            self._frame(route.session).closes.append(close)

    def _frame(self, session: _Session) -> pb.DraftFrame:
        """What this step has to say to this worker so far."""
        return self._frames.setdefault(session.up.number, pb.DraftFrame())
