"""`Drafting` over the network: a pool of draft workers, one link to each, one frame per link and step.

Two threads meet here. The engine's thread says what to draft and never waits except in `poll`; the event loop
holds the links. Between them there are two one-way streets: frames go to the loop by `call_soon_threadsafe`,
arrivals go to the engine through a queue.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.engine.drafting import News
from paceline.speculators.base import Commit, Context, Opening
from paceline.v1 import draft_pb2 as pb
from paceline.wire.draft_frames import DraftDescription, encode_commit, encode_context, encode_opening
from paceline.wire.draft_link import Arrival, DraftLink, OpenRequest, RefusedError, Session, Terms


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a request is drafted, and its id on that link."""

    session: Session
    wire_id: int


class RemoteDrafting:
    """Draft workers that the engine reaches by their addresses.

    Construct it on the event loop, and `await stop()` there. `connect` is for the event loop, too; everything
    else is the engine's `Drafting` and belongs to the engine's thread.
    """

    def __init__(self, terms: Terms, hidden_state_layers: Sequence[int] = ()) -> None:
        """`hidden_state_layers`: what the engine is to send. Workers that ask for others are refused."""
        self.hidden_state_layers: Sequence[int] = tuple(hidden_state_layers)
        self._loop = asyncio.get_running_loop()
        self._terms = terms
        self._links: dict[str, DraftLink] = {}  # written on the event loop only
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        # The rest belongs to the engine's thread.
        self._next_id = 1
        self._routes: dict[int, _Route] = {}
        self._dropped_by: defaultdict[int, set[str]] = defaultdict(set)
        self._frames: dict[Session, pb.DraftFrame] = {}

    # On the event loop.

    def connect(self, addresses: Iterable[str]) -> None:
        """Reach for these workers, so that they are there when a request names them."""
        for address in addresses:
            if address not in self._links:
                link = self._links[address] = DraftLink(address, self._terms, self._admit, self._arrivals.put)
                task = self._loop.create_task(self._keep(link), name=f"link to draft {address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @property
    def connected(self) -> list[str]:
        """Addresses of the workers that are up. Any thread."""
        return [address for address, link in list(self._links.items()) if link.session]

    async def stop(self) -> None:
        """End every link. The workers forget what was open on them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, worker: DraftDescription) -> None:
        """Raises `RefusedError` if this worker cannot draft for this target."""
        expected = self._terms.vocabulary_fingerprint
        if worker.vocabulary_fingerprint not in ("", expected):
            raise RefusedError(
                f"its vocabulary {worker.vocabulary_fingerprint} is not the target's {expected}: "
                f"start it with a draft model that shares the target's tokenizer"
            )
        if tuple(worker.hidden_state_layers) not in ((), self.hidden_state_layers):
            raise RefusedError(
                f"it asks for hidden states of layers {tuple(worker.hidden_state_layers)}, this target sends "
                f"{self.hidden_state_layers}: start both with the same --speculative-config"
            )

    async def _keep(self, link: DraftLink) -> None:
        try:
            await link.run()
        finally:
            del self._links[link.address]

    # On the engine's thread.

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """See `Drafting.open`. A worker that dropped this request before is passed over."""
        self._leave(opening.request_id, pb.DraftFrame.CLOSE_REASON_MOVED)
        session = self._pick(drafts, self._dropped_by.get(opening.request_id, ()))
        if session is None:
            return None
        route = _Route(session, self._next_id)
        self._next_id += 1
        session.last_id = route.wire_id
        session.requests[route.wire_id] = OpenRequest(opening.request_id, opening.max_nodes)
        self._routes[opening.request_id] = route
        self._frame(session).opens.append(encode_opening(opening, route.wire_id))
        return session.description.worker_id

    def context(self, context: Context) -> None:
        route = self._routes.get(context.request_id)
        if route and route.session.description.hidden_state_layers:
            self._frame(route.session).contexts.append(encode_context(context, route.wire_id))

    def commit(self, commit: Commit) -> None:
        if route := self._routes.get(commit.request_id):
            route.session.requests[route.wire_id].commits += 1
            if not route.session.description.hidden_state_layers:
                commit = replace(commit, hidden_states=None)
            self._frame(route.session).commits.append(encode_commit(commit, route.wire_id))

    def close(self, request_id: int) -> None:
        self._leave(request_id, pb.DraftFrame.CLOSE_REASON_FINISHED)
        self._dropped_by.pop(request_id, None)

    def flush(self) -> None:
        for session, frame in self._frames.items():
            self._loop.call_soon_threadsafe(session.say, frame)
        self._frames = {}

    def poll(self, timeout_s: float) -> News:
        news = News()
        deadline = time.monotonic() + timeout_s
        while arrival := self._next_arrival(0.0 if news else deadline - time.monotonic()):
            self._sort(arrival, news)
        return news

    def _next_arrival(self, wait_s: float) -> Arrival | None:
        try:
            return self._arrivals.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return None

    def _sort(self, arrival: Arrival, news: News) -> None:
        """Take in one arrival. What concerns requests that were closed or moved is late, and dropped."""
        requests = arrival.session.requests
        grown = arrival.grown
        for wire_id, growth in grown.growths if grown else ():
            if request := requests.get(wire_id):
                news.grown.append((request.request_id, growth))
        for wire_id in grown.dropped if grown else requests.copy():
            if request := requests.pop(wire_id, None):
                del self._routes[request.request_id]
                news.lost.append(request.request_id)
                if grown:
                    self._dropped_by[request.request_id].add(arrival.session.address)

    def _pick(self, drafts: Sequence[str], unwanted: Collection[str]) -> Session | None:
        links = {address: self._links.get(address) for address in drafts}
        if not all(links.values()):
            self._loop.call_soon_threadsafe(self.connect, drafts)
        sessions = (link.session for address, link in links.items() if link and address not in unwanted)
        return next(filter(None, sessions), None)

    def _leave(self, request_id: int, reason: pb.DraftFrame.CloseReason) -> None:
        if route := self._routes.pop(request_id, None):
            del route.session.requests[route.wire_id]
            close = pb.DraftFrame.Close(request_id=route.wire_id, reason=reason)
            self._frame(route.session).closes.append(close)

    def _frame(self, session: Session) -> pb.DraftFrame:
        """What this step has to say on this link so far."""
        return self._frames.setdefault(session, pb.DraftFrame())
