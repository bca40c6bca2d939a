"""Journals of streams: what Redis keeps of a streamed API request, so that any gateway can continue it.

A journal is a list of entries, each a JSON text. The first one is the request: its body, when it came, and a digest of
the completions that it asks for. Then come the deltas of its completions, in the order in which the client gets them.
`resumption.py` writes and reads those.

A gateway appends only if it knows all entries. A gateway that takes a request over appends an entry of its own first,
by which the earlier owner finds out that it has lost the request: see `RecordStore.append`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from pydantic_core import from_json, to_json

from paceline.state.record_store import Append
from paceline.state.state_errors import StateUnavailableError
from paceline.state.state_store import StateStore
from paceline_services.gateway.api_errors import ApiError, UnavailableError
from paceline_services.gateway.http.json_body import Json

Entry = Json | list[Any]
"""An object: the request, a new owner, what another gateway asks of the owner, or the error that ended the request.
A list: a delta."""

WRITE_S = 0.5
"""A stream that waits longer for Redis goes on without a journal."""
MAX_JOURNAL_BYTES = 4 * 2**20
"""A request whose journal would be longer goes on without it."""


class StreamLeftError(ApiError):
    """The stream ends here, but the request may go on elsewhere."""

    status = 409
    type = "invalid_request_error"
    code = "resumed_elsewhere"


class JournalState(Enum):
    """What this gateway has of a journal."""

    NEW = auto()
    """Nothing is written yet."""
    REPLAYING = auto()
    """Its entries are read. Another gateway may own it."""
    OWNED = auto()
    """All entries are read, and this gateway appends."""
    LOST = auto()
    """It is not kept, or cannot be reached."""


class Journals:
    """The journals of one gateway's requests. Appends of all requests that wait share one round trip to Redis."""

    def __init__(self, store: StateStore, *, enabled: bool) -> None:
        """`enabled`: whether streams have journals."""
        self.enabled = enabled
        self._store = store
        self._waiting: list[tuple[Append, asyncio.Future[int]]] = []
        self._writing: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether a journal would be kept now."""
        return self.enabled and not self._store.presence.unavailable

    async def append(self, append: Append) -> int:
        """What `RecordStore.append` returns for it; 0 also if Redis does not answer in time."""
        if not self.available:
            return 0
        length: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((append, length))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="write journals")
        return await length

    async def load(self, client: str, request_id: str, start: int = 0) -> list[Entry]:
        """The entries from `start` on. Raises `UnavailableError`."""
        try:
            entries = await self._store.records.load(client, request_id, start) if self.enabled else []
        except StateUnavailableError as error:
            raise unavailable() from error
        return [from_json(entry) for entry in entries]

    async def find(self, client: str, request_id: str) -> Journal | None:
        """The journal of an earlier request. Raises `UnavailableError`."""
        entries = await self.load(client, request_id)
        if not entries:
            return None
        request, *unread = entries
        assert isinstance(request, dict), "a journal begins with its request"
        journal = Journal(self, client, request_id, **request | {"body": request["body"].encode()})
        journal.state, journal.length, journal.unread = JournalState.REPLAYING, len(entries), unread
        return journal

    async def unleased(self) -> list[Journal]:
        """The journals whose lease has run out. Raises `StateUnavailableError` or `UnavailableError`."""
        found = []
        for client, request_id in await self._store.records.unleased() if self.enabled else ():
            if (journal := await self.find(client, request_id)) is not None:
                found.append(journal)
            else:
                await self.delete(client, request_id)
        # Who takes a journal over after this appends to it: then it has more entries than were found here.
        still = await self._store.records.unleased() if found else []
        return [journal for journal in found if (journal.client, journal.id) in still]

    async def delete(self, client: str, request_id: str) -> None:
        """Forget a journal, unless Redis is away."""
        if self.enabled:
            await self._store.presence.attempt(self._store.records.delete(client, request_id))

    async def _write(self) -> None:
        """Append what waits, until nothing does."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            lengths = [0] * len(batch)
            try:
                await self._store.presence.attempt(self._append_all([each for each, _ in batch], lengths))
            finally:
                for (_, waiting), length in zip(batch, lengths, strict=True):
                    if not waiting.done():  # its request was cancelled
                        waiting.set_result(length)
        self._writing = None

    async def _append_all(self, appends: Sequence[Append], lengths: list[int]) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                lengths[:] = await self._store.records.append(appends)
        except TimeoutError as error:
            raise StateUnavailableError(f"no answer within {WRITE_S:g} s") from error


@dataclass(slots=True)
class Journal:
    """One API request with its journal, as one gateway has it."""

    journals: Journals
    client: str
    """The name of the request's API key."""
    id: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    """Those on which the answer depends."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the request came; whole seconds since 1970."""
    digest: str = ""
    """Of the completions. "": they are not known yet."""
    state: JournalState = JournalState.NEW
    length: int = 0
    """Entries that this gateway has."""
    unread: list[Entry] = field(default_factory=list)
    """The last ones of them, which `read` returns first."""
    seen: int = 0
    """Events of the stream that the client has."""
    now: int = field(default_factory=lambda: int(time.time()))
    """When the latest delta came, by the clock of the gateway that had it from its target."""
    on_cancel: Callable[[], object] = lambda: None
    """Called when another gateway asks the owner to end the request."""
    _lease_s: float | None = None
    """See `Append.lease_s`."""
    _bytes: int = 0
    _appending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def event_id(self, number: int) -> str | None:
        """The id of an event of the stream, from 1; None: the events have no ids; "": they have none from here on."""
        if self.state is JournalState.LOST:
            return "" if self.length else None
        return f"{self.id}:{number}"

    async def read(self) -> list[Entry]:
        """The entries that were not read. Raises `UnavailableError`, or `StreamLeftError` if there is no journal."""
        last = await self.journals.load(self.client, self.id, self.length - 1)
        if not last:
            raise StreamLeftError("the stream is not kept any more", code="stream_not_found", status=404)
        found, self.unread = self.unread + last[1:], []
        self.length += len(last) - 1
        return found

    async def append(self, *entries: Entry) -> None:
        """Append as the owner, unless the journal is lost; without entries, learn what other gateways ask for.

        Raises `StreamLeftError` if another gateway has taken the request over.
        """
        async with self._appending:
            while self.state is not JournalState.LOST and (others := await self._write(*entries)):
                if any("owner" in each for each in others):
                    raise StreamLeftError("this stream was resumed by another connection")
                self.on_cancel()

    async def claim(self) -> list[Entry]:
        """Own the request. Returns the entries that have to be read before; none: it is this gateway's, or `LOST`."""
        return await self._write({"owner": secrets.token_hex(8)})

    async def lease(self, seconds: float) -> bool:
        """Own the request, which no client waits for, for so long from now and from each append on; 0: it has ended.

        A new request is written down. Returns False if another gateway is faster, or the journal is not kept.
        """
        self._lease_s = seconds
        if await self.claim() or self.state is JournalState.LOST:
            return False
        self.state = JournalState.REPLAYING
        return True

    async def renew(self) -> None:
        """Prolong the lease, and learn what other gateways ask for. Raises `StreamLeftError`."""
        if self.state is JournalState.OWNED and not self._appending.locked():
            await self.append()

    async def cancel(self) -> None:
        """Tell the request's owner to end it. Raises `UnavailableError`."""
        while await self._write({"cancel": True}):
            pass
        if self.state is JournalState.LOST:
            raise unavailable()

    async def _write(self, *entries: Entry) -> list[Entry]:
        """Append after the entries that this gateway has; before the first one the request.

        Returns the entries that come there instead; none: it is done, or the journal is lost.
        """
        if self.state is JournalState.NEW:
            request = {"path": self.path, "body": self.body.decode(), "headers": dict(self.headers)}
            entries = ({**request, "created": self.created, "digest": self.digest}, *entries)
        texts = [to_json(each).decode() for each in entries]
        self._bytes += sum(map(len, texts))
        if self._bytes <= MAX_JOURNAL_BYTES:
            length = await self.journals.append(Append(self.client, self.id, self.length, texts, self._lease_s))
        else:
            length = 0
            await self.journals.delete(self.client, self.id)
        if length > 0:
            self.length, self.state = length, JournalState.OWNED
            return []
        others: list[Entry] = []
        with suppress(UnavailableError, StreamLeftError):
            others = await self.read() if length else []
        if not others:
            self.state = JournalState.LOST
        return others


def unavailable() -> UnavailableError:
    """Why a stream cannot be resumed now."""
    message = "this stream is kept in Redis, which does not answer now; try again soon"
    return UnavailableError(message, code="resumption_unavailable")
