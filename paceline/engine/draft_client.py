"""How an engine reaches its drafts: a speculator in this process, a pool of draft workers, or none.

Nothing here blocks, except `poll` for up to its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.growth import Growth
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator


@dataclass(slots=True)
class PollResult:
    """Messages from drafts since the last poll: growth by request, and requests that lost their draft."""

    growths: list[tuple[int, Growth]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    may_continue: bool = True
    """Whether another poll may bring something before the next commit."""

    def __bool__(self) -> bool:
        return bool(self.growths or self.lost)


class DraftClient:
    """The engine's side of drafting. This base class reaches no draft."""

    hidden_state_layers: Sequence[int] = ()
    """Target layers whose hidden states the drafts read."""
    concurrent: bool = True
    """Whether drafts run while the target computes."""

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """Start drafting at the first of `drafts` that is reachable. Return its name, or None for plain decoding.

        Opening a request again after its draft was lost moves it to another draft.
        """
        return None

    def context(self, context: Context) -> None:
        """Queue hidden states of committed positions."""

    def commit(self, commit: Commit) -> None:
        """Queue committed tokens."""

    def limit(self, limit: Limit) -> None:
        """Queue a new limit of a request's tree."""

    def close(self, request_id: int) -> None:
        """Stop drafting for a request."""

    def flush(self) -> None:
        """Send all queued messages."""

    def poll(self, timeout_s: float) -> PollResult:
        """Messages from drafts. Waits up to `timeout_s` seconds for the first one."""
        return PollResult()


class NoDraftClient(DraftClient):
    """Plain decoding."""


class LocalDraftClient(DraftClient):
    """A speculator inside the target's process. Each poll runs one round of drafting; see `InlineSchedule`."""

    concurrent = False

    def __init__(self, speculator: Speculator) -> None:
        self.hidden_state_layers = speculator.description.hidden_state_layers
        self._speculator = speculator
        self._lost: list[int] = []

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        try:
            self._speculator.open(opening)
        except DraftError:
            self._speculator.close(opening.request_id)
            return None
        return "local"

    def context(self, context: Context) -> None:
        try:
            self._speculator.context(context)
        except DraftError:
            self._lose(context.request_id)

    def commit(self, commit: Commit) -> None:
        try:
            self._speculator.commit(commit)
        except DraftError:
            self._lose(commit.request_id)

    def limit(self, limit: Limit) -> None:
        self._speculator.limit(limit)

    def close(self, request_id: int) -> None:
        self._speculator.close(request_id)

    def poll(self, timeout_s: float) -> PollResult:
        """Run one round. Run more, up to the timeout, while the speculator is still computing its context."""
        deadline = time.monotonic() + timeout_s
        grown = self._speculator.grow()
        while not grown and self._speculator.behind and time.monotonic() < deadline:
            grown = self._speculator.grow()
        growths = [(key, growth.check()) for key, growth in grown.items()]
        lost, self._lost = self._lost, []
        return PollResult(growths, lost, self._speculator.behind)

    def _lose(self, request_id: int) -> None:
        self._speculator.close(request_id)
        self._lost.append(request_id)
