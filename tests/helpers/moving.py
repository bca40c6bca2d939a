"""A draft in the target's process that dies as a draft worker does."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.speculator import Commit, Context, Speculator
from paceline.engine.draft_client import LocalDraftClient


class Moving(LocalDraftClient):
    """Of what it is told of requests, some numbers find their worker dead; another takes the request over."""

    def __init__(self, speculator: Speculator, losses: Sequence[int]) -> None:
        super().__init__(speculator)
        self._losses = set(losses)
        self._said = 0

    def context(self, context: Context) -> None:
        if self._alive(context.request_id):
            super().context(context)

    def commit(self, commit: Commit) -> None:
        if self._alive(commit.request_id):
            super().commit(commit)

    def _alive(self, key: int) -> bool:
        self._said += 1
        if self._said in self._losses:
            self._lose(key)
        return self._said not in self._losses
