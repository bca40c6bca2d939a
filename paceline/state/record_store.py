"""What gateways keep for their clients: finished responses, and the journals of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

RESPONSE_S = 3600.0
RESUMABLE_S = 300.0
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What a store of records keeps, and for how long. 0 seconds: nothing of that kind."""

    response_s: float = RESPONSE_S
    """A finished response, for `previous_response_id`."""
    resumable_s: float = RESUMABLE_S
    """A journal, after its last entry."""
    max_bytes: int = MAX_BYTES
    """Of all records together. Beyond it, the client that has the most bytes loses the record that expires first."""


@dataclass(frozen=True, slots=True)
class Append:
    """New entries of one journal, at `position`: the number of entries that its writer knows."""

    client: str
    record_id: str
    position: int
    entries: Sequence[str]
    lease_s: float | None = None
    """How long the writer promises to go on with a request that no client waits for; 0: it has ended. None: no such
    request."""


class RecordStore(Protocol):
    """Records by client and id. A client is the name of its API key, "" without keys; it sees its own records only.

    A record is a list of entries, texts that the store does not read. A response has one entry. A journal grows, and
    whoever appends must know all of its entries: so of two writers one finds out that the other is there. Calls raise
    `StateUnavailableError` while Redis does not answer.
    """

    async def save(self, client: str, record_id: str, entry: str) -> None:
        """Keep a response, or another one under the same id, within the limits: a record beyond them is not kept."""

    async def append(self, appends: Sequence[Append]) -> list[int]:
        """Append to each journal that has exactly `position` entries; position 0 begins one.

        Returns the new length of each journal; where nothing was appended, minus its length: 0, if it is not kept (any
        more). A call may be repeated: then the entry at `position` is the writer's own.
        """

    async def load(self, client: str, record_id: str, start: int = 0) -> list[str]:
        """The entries from `start` on. Empty: no such record, or not any more, or no more entries."""

    async def delete(self, client: str, record_id: str) -> bool:
        """Return whether there was such a record."""

    async def unleased(self) -> list[tuple[str, str]]:
        """Client and id of the journals whose lease has run out."""
