"""`DraftClient` over the network: a pool of draft workers, and one frame per worker and step.

This is the engine's end: it assigns requests to workers and writes the frames. The links (`draft_pool`) run on an event
loop in another process, at the other end of the engine's pipe.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftClient, PollResult
from paceline.ipc.pipe import Pipe
from paceline.v1 import draft_pb2 as pb
from paceline.wire.draft_codec import encode_commit, encode_context, encode_limit, encode_opening
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame, StreamDown, StreamUp, StreamUpdate


@dataclass(slots=True)
class _ConnectedWorker:
    """A draft worker with an open stream."""

    up: StreamUp
    requests: dict[int, int] = field(default_factory=dict)
    """The engine's request ids by those on the link."""
    frame: pb.DraftFrame = field(default_factory=pb.DraftFrame)
    """What this step sends, so far."""


class RemoteDraftClient(DraftClient):
    """Draft workers that the engine reaches through its pipe."""

    concurrent = True

    def __init__(self, pipe: Pipe, clock: Callable[[], float] = time.monotonic) -> None:
        self.hidden_state_layers: Sequence[int] = ()
        """Layers whose hidden states the workers need; `DraftPool` ensures that they agree."""
        self._pipe = pipe
        self._clock = clock
        self._workers: dict[int, _ConnectedWorker] = {}
        self._next_id = 1
        self._assignments: dict[int, tuple[_ConnectedWorker, int]] = {}
        """By request: the worker that drafts for it, and its id on that link."""
        self._dropped_by: defaultdict[int, set[str]] = defaultdict(set)
        """Addresses of the workers that dropped a request, by request."""
        self._updates = PollResult()
        pipe.on(StreamUp, self._on_stream_up)
        pipe.on(StreamUpdate, self._on_stream_update)
        pipe.on(StreamDown, self._on_stream_down)

    def connected(self) -> list[str]:
        """Addresses of the workers that are up, the one with the fewest requests first."""
        return [each.up.address for each in sorted(self._workers.values(), key=lambda each: len(each.requests))]

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """See `DraftClient.open`. Skips workers that dropped this request before."""
        self._close_draft(opening.request_id, pb.DraftFrame.CLOSE_REASON_MOVED)
        worker = self._pick(drafts, self._dropped_by.get(opening.request_id, ()))
        if worker is None:
            return None
        wire_id = self._next_id
        self._next_id += 1
        self._assignments[opening.request_id] = worker, wire_id
        worker.requests[wire_id] = opening.request_id
        worker.frame.opens.append(encode_opening(opening, wire_id))
        return worker.up.worker_id

    def context(self, context: Context) -> None:
        worker, wire_id = self._assignments.get(context.request_id, (None, 0))
        if worker and worker.up.hidden_state_layers:
            worker.frame.contexts.append(encode_context(context, wire_id))

    def commit(self, commit: Commit) -> None:
        worker, wire_id = self._assignments.get(commit.request_id, (None, 0))
        if worker:
            if commit.hidden_states is not None and not worker.up.hidden_state_layers:
                commit = replace(commit, hidden_states=None)
            worker.frame.commits.append(encode_commit(commit, wire_id))

    def limit(self, limit: Limit) -> None:
        worker, wire_id = self._assignments.get(limit.request_id, (None, 0))
        if worker:
            worker.frame.limits.append(encode_limit(limit, wire_id))

    def close(self, request_id: int) -> None:
        self._close_draft(request_id, pb.DraftFrame.CLOSE_REASON_FINISHED)
        self._dropped_by.pop(request_id, None)

    def flush(self) -> None:
        for stream_id, worker in self._workers.items():
            if worker.frame.ListFields():
                self._pipe.send(SendDraftFrame(stream_id, worker.frame.SerializeToString()))
                worker.frame.Clear()

    def poll(self, timeout_s: float) -> PollResult:
        """Raises `PipeClosedError`."""
        deadline = self._clock() + timeout_s
        self._pipe.receive(0.0)
        while not self._updates and (left_s := deadline - self._clock()) > 0:
            self._pipe.receive(left_s)
        updates, self._updates = self._updates, PollResult()
        return updates

    # Messages from the pipe. Growth and drops of requests that have been closed or moved are late and ignored.

    def _on_stream_up(self, up: StreamUp) -> None:
        self._workers[up.stream_id] = _ConnectedWorker(up)
        self.hidden_state_layers = up.hidden_state_layers or self.hidden_state_layers

    def _on_stream_update(self, message: StreamUpdate) -> None:
        worker = self._workers[message.stream_id]
        for wire_id, growth in message.growths:
            if (request_id := worker.requests.get(wire_id)) is not None:
                self._updates.growths.append((request_id, growth))
        for wire_id in message.dropped:
            if (request_id := worker.requests.get(wire_id)) is not None:
                self._dropped_by[request_id].add(worker.up.address)
                self._lose(worker, wire_id)

    def _on_stream_down(self, down: StreamDown) -> None:
        worker = self._workers.pop(down.stream_id)
        for wire_id in list(worker.requests):
            self._lose(worker, wire_id)

    def _lose(self, worker: _ConnectedWorker, wire_id: int) -> None:
        request_id = worker.requests.pop(wire_id)
        del self._assignments[request_id]
        self._updates.lost.append(request_id)

    def _pick(self, drafts: Sequence[str], excluded: Collection[str]) -> _ConnectedWorker | None:
        up = {worker.up.address: worker for worker in self._workers.values()}
        if not up.keys() >= set(drafts):
            self._pipe.send(ConnectDrafts(drafts))
        return next((up[address] for address in drafts if address in up and address not in excluded), None)

    def _close_draft(self, request_id: int, reason: pb.DraftFrame.CloseReason) -> None:
        worker, wire_id = self._assignments.pop(request_id, (None, 0))
        if worker:
            del worker.requests[wire_id]
            worker.frame.closes.append(pb.DraftFrame.Close(request_id=wire_id, reason=reason))
