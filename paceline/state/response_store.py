"""Finished responses of OpenAI's Responses API, so that their clients can continue, read and delete them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TTL_S = 3600.0
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """What a store of responses keeps, and for how long."""

    ttl_s: float = TTL_S
    max_bytes: int = MAX_BYTES
    """Of all records together. Beyond it, the client that has the most bytes loses its oldest response."""


class ResponseStore(Protocol):
    """Records by client and id. A client is the name of its API key, "" without keys; it sees its own records only.

    A record is a text; the store does not read it. Calls raise `StateUnavailableError` while Redis does not answer.
    """

    async def save(self, client: str, response_id: str, record: str) -> None:
        """Keep a record, or another one under the same id, within the limits: a record beyond them is not kept."""

    async def load(self, client: str, response_id: str) -> str | None:
        """None: not kept, or not any more."""

    async def delete(self, client: str, response_id: str) -> bool:
        """Return whether there was such a record."""
