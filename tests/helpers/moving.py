"""A draft in the target's process that loses requests as a dying draft worker does."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.speculator import Commit, Context, Speculator
from paceline.engine.draft_client import LocalDraftClient


class Moving(LocalDraftClient):
    """Loses the request of the n-th event, for each n in `losses`; the engine then opens it again."""

    def __init__(self, speculator: Speculator, losses: Sequence[int]) -> None:
        super().__init__(speculator)
        self._losses = set(losses)
        self._events = 0

    def context(self, context: Context) -> None:
        if self._alive(context.request_id):
            super().context(context)

    def commit(self, commit: Commit) -> None:
        if self._alive(commit.request_id):
            super().commit(commit)

    def _alive(self, key: int) -> bool:
        self._events += 1
        if self._events in self._losses:
            self._lose(key)
        return self._events not in self._losses
