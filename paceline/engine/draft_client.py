"""The engine's view of whoever grows trees: a speculator in this process, a pool of draft workers, or nobody.

Nothing here blocks, except `poll` for as long as it is told to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.growth import Growth
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator


@dataclass(slots=True)
class DraftUpdates:
    """What came from drafts since the last poll: growth as (request, growth), and requests that lost their draft."""

    growths: list[tuple[int, Growth]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    may_continue: bool = True
    """Whether another poll may bring something before a commit does."""

    def __bool__(self) -> bool:
        return bool(self.growths or self.lost)


class DraftClient(Protocol):
    """How an engine reaches its drafts."""

    hidden_state_layers: Sequence[int]
    concurrent: bool
    """Whether drafts go on while the target computes."""

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        """Start drafting at the first of `drafts` that is reachable; return its name, or None: decode plainly.

        Opening a request again after it was lost moves it to another draft.
        """

    def context(self, context: Context) -> None: ...

    def commit(self, commit: Commit) -> None: ...

    def limit(self, limit: Limit) -> None: ...

    def close(self, request_id: int) -> None: ...

    def flush(self) -> None:
        """Send what was said since the last time."""

    def poll(self, timeout_s: float) -> DraftUpdates:
        """What has arrived. Waits up to `timeout_s` seconds if nothing has."""


class NoDraftClient:
    """Nobody grows trees: plain decoding."""

    hidden_state_layers: Sequence[int] = ()
    concurrent = True

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        return None

    def context(self, context: Context) -> None: ...

    def commit(self, commit: Commit) -> None: ...

    def limit(self, limit: Limit) -> None: ...

    def close(self, request_id: int) -> None: ...

    def flush(self) -> None: ...

    def poll(self, timeout_s: float) -> DraftUpdates:
        return DraftUpdates()


class LocalDraftClient:
    """A speculator inside the target's process. Each poll is one round of drafting; see `waiting.InlineSchedule`."""

    concurrent = False

    def __init__(self, speculator: Speculator) -> None:
        self.hidden_state_layers = speculator.hidden_state_layers
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

    def flush(self) -> None: ...

    def poll(self, timeout_s: float) -> DraftUpdates:
        """One round; while there is time, more of them until the context is computed that guesses need."""
        deadline = time.monotonic() + timeout_s
        grown = self._speculator.grow()
        while not grown and self._speculator.behind and time.monotonic() < deadline:
            grown = self._speculator.grow()
        news = DraftUpdates(
            [(key, growth.check()) for key, growth in grown.items()], self._lost, self._speculator.behind
        )
        self._lost = []
        return news

    def _lose(self, request_id: int) -> None:
        self._speculator.close(request_id)
        self._lost.append(request_id)
