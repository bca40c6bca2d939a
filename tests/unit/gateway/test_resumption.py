"""A gateway that takes a stream over and then cannot reach its journal."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_services.gateway.api_errors import UnavailableError
from paceline_services.gateway.generation.journal import Journal, JournalState
from paceline_services.gateway.generation.resumption import JournalDeltas


class RedisThatGoes:
    """A journal can be read, and then not be appended to."""

    async def load(self, client: str, request_id: str, start: int = 0) -> list[Any]:
        return [{}]  # the one that is known

    async def append(self, append: object) -> int:
        return 0


async def test_repeated_events_keep_their_ids_if_the_journal_cannot_be_claimed() -> None:
    """A client that was told to forget them could not come again after the error."""
    journal = Journal(RedisThatGoes(), "alice", "r", "/v1/completions", b"", {}, state=JournalState.REPLAYING, length=1)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError) as refusal:
        _ = [delta async for delta in JournalDeltas(journal).claimed(1)]
    assert refusal.value.code == "resumption_unavailable"
    assert journal.event_id(3) == "r:3"
