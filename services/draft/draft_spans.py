"""A draft worker's span of each traced request: from its opening to its close, with what was drafted for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.drafting.draft_loop import LinkUpdate, RequestClosed, RequestEvent
from paceline.drafting.speculator import Commit, DraftDescription, Opening
from paceline.telemetry.tracing import Attributes, TraceSpan, Tracing


@dataclass(slots=True)
class _OpenSpan:
    """One request's span, and what is counted for it."""

    span: TraceSpan
    growths: int = 0
    """Messages with new nodes."""
    nodes: int = 0
    commits: int = 0
    tokens: int = 0
    """Committed by the target."""
    accepted: int = 0
    """Those of them that were guessed."""

    def end(self) -> None:
        self.span.set(
            {
                "paceline.draft.growths": self.growths,
                "paceline.draft.nodes": self.nodes,
                "paceline.draft.commits": self.commits,
                "paceline.draft.committed_tokens": self.tokens,
                "paceline.draft.accepted_tokens": self.accepted,
            }
        )
        self.span.end()


class DraftSpans:
    """The open spans of one link, by the link's request ids."""

    def __init__(self, tracing: Tracing, draft: DraftDescription) -> None:
        self._tracing = tracing
        self._worker: Attributes = {
            "paceline.worker.id": draft.worker_id,
            "paceline.draft.method": draft.method,
            "paceline.draft.model": draft.model,
        }
        self._open: dict[int, _OpenSpan] = {}

    def receive(self, events: Iterable[RequestEvent]) -> None:
        """Take note of a frame's events, in order."""
        for event in events:
            if isinstance(event, Opening):
                self._start(event)
            elif (open_span := self._open.get(event.request_id)) is None:
                continue
            elif isinstance(event, Commit):
                open_span.commits += 1
                open_span.tokens += len(event.tokens)
                open_span.accepted += event.accepted
            elif isinstance(event, RequestClosed):
                self._open.pop(event.request_id).end()

    def send(self, update: LinkUpdate) -> None:
        """Take note of what the worker sends."""
        if not self._open:
            return
        for request_id, _, _, nodes in update.growths.headers:
            if open_span := self._open.get(request_id):
                open_span.growths += 1
                open_span.nodes += nodes
        for request_id, reason in update.dropped.items():
            if open_span := self._open.pop(request_id, None):
                open_span.span.fail("dropped", reason)
                open_span.end()

    def close(self) -> None:
        """End all spans with the link."""
        for open_span in self._open.values():
            open_span.end()
        self._open.clear()

    def _start(self, opening: Opening) -> None:
        attributes = {**self._worker, "paceline.draft.context_tokens": len(opening.tokens)}
        if span := self._tracing.start("draft_request", opening.trace_parent, attributes, role="server"):
            self._open[opening.request_id] = _OpenSpan(span)
