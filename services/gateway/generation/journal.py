"""Journals of streams: what Redis keeps of a streamed API request, so that any gateway can continue it.

A journal is a list of entries, each a JSON text. The first one is the request: its body, when it came, and a digest of
the completions that it asks for. Then come the deltas of its completions, in the order in which the client gets them,
each before its events are sent. The events of a stream follow from these alone: so a gateway that reads a journal
repeats them, and continues after the last committed token.

A gateway appends only if it knows all entries. A gateway that takes a request over appends an entry of its own first,
by which the earlier owner finds out that it has lost the request: see `RecordStore.append`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from pydantic_core import from_json, to_json

from paceline.messages import Delta
from paceline.output_processor import OutputProcessor, TextDelta
from paceline.state.record_store import Append
from paceline.state.state_errors import StateUnavailableError
from paceline.state.state_store import StateStore
from paceline.v1 import target_pb2
from paceline.wire.target_codec import decode_delta, encode_delta
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError, RetryLaterError, UnavailableError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.completion_request import CompletionRequest
from paceline_services.gateway.field_types import Json
from paceline_services.gateway.generation.served_model import ServedModel, with_text

T = TypeVar("T")
Entry = Json | list[Any]
"""An object; or a delta: index of its completion, when it came, the target's numerics if they are new, its message."""

WRITE_S = 0.5
"""A stream that waits longer for Redis goes on without a journal."""
MAX_JOURNAL_BYTES = 4 * 2**20
"""A request whose journal would be longer goes on without it."""
HANDED_OVER_S = 0.001
"""The lease of a request that any gateway may take over."""
FOLLOW_S = 0.1
"""How often a request that runs elsewhere is looked at."""
LOST = 0
"""What an append returns if the journal is not kept, or cannot be reached."""


class StreamLeftError(ApiError):
    """The stream ends here, but the request may go on elsewhere."""

    status = 409
    type = "invalid_request_error"
    code = "resumed_elsewhere"


class TimedDelta(NamedTuple):
    """A delta; `when` it came, in seconds since 1970; `new`: it is not in the journal."""

    completion: int
    delta: TextDelta
    when: int
    new: bool


class Written(Enum):
    """What became of an attempt to append."""

    YES = auto()
    BEHIND = auto()
    """There are entries that this gateway does not know."""
    LOST = auto()
    """The journal is not kept, or cannot be reached."""


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
        """What `RecordStore.append` returns for it; `LOST` also if Redis does not answer in time."""
        if not self.available:
            return LOST
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
            raise _unavailable() from error
        return [from_json(entry) for entry in entries]

    async def find(self, client: str, request_id: str) -> Journal | None:
        """The journal of an earlier request. Raises `UnavailableError`."""
        entries = await self.load(client, request_id)
        if not entries:
            return None
        assert isinstance(entries[0], dict), "a journal begins with its request"
        request = dict(entries[0])
        body = request.pop("body").encode()
        journal = Journal(self, client, request_id, body=body, position=1, kept=True, **request)
        journal.length = len(entries)
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
            lengths = [LOST] * len(batch)
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
    position: int = 0
    """Entries that this gateway knows. 0: the request begins here."""
    length: int = 0
    """Entries that there were when the journal was found."""
    kept: bool = False
    """Whether all deltas so far are in the journal."""
    seen: int = 0
    """Events of the stream that the client has."""
    now: int = field(default_factory=lambda: int(time.time()))
    """When the latest delta came, by the clock of the gateway that had it from its target."""
    lease_s: float | None = None
    """See `Append.lease_s`."""
    _bytes: int = 0
    _replaying: bool = False
    _replayed: int = 0
    """When the latest delta came that was read."""
    _numerics: dict[int, str] = field(default_factory=dict)
    """Of the target that drew the latest token, by completion."""
    _appending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def event_id(self, number: int) -> str | None:
        """The id of an event of the stream, from 1; None: the events have no ids; "": they have none from here on."""
        if self.kept:
            return f"{self.id}:{number}"
        return "" if self.position else None

    async def deltas(
        self, model: ServedModel, requests: Sequence[CompletionRequest], client: ApiClient, *, streamed: bool
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        """`ServedModel.generate_all`, with each delta in the journal before it comes out of here; and before them the
        deltas that are in the journal. A request that is not streamed has no journal.

        Raises the error with which the request ended at another gateway, `StreamLeftError`, or what `generate_all`
        raises.
        """
        self.kept = bool(self.position) or (streamed and self.journals.available)
        if not self.kept:
            async with aclosing(model.generate_all(requests, client)) as deltas:
                async for item in deltas:
                    self.now = int(time.time())
                    yield item
            return
        self.check(requests)
        before = None
        if self.position:
            before = self._claimed(len(requests), model)
            attempt = secrets.token_hex(4)
            requests = [replace(each, attempt=attempt) for each in requests]
        try:
            deltas = model.generate_all(requests, client, before, self._numerics)
            async with aclosing(gathered(self._timed(deltas))) as batches:
                async for batch in batches:
                    await self._append([self._entry(each) for each in batch if each.new], model)
                    for each in batch:
                        self.now = each.when
                        yield each.completion, each.delta
                        if not each.new:
                            await _let_others_run()
        except (RetryLaterError, StreamLeftError):
            raise
        except ApiError as error:
            if self.position and not self._replaying:
                await self._append([_error_entry(error)], model)
            raise

    def check(self, requests: Sequence[CompletionRequest]) -> None:
        """Raises `InvalidRequestError` if these completions are not those for which the journal was begun."""
        digest = _digest(requests)
        if self.digest not in ("", digest):
            raise InvalidRequestError(
                "the stream cannot be resumed: its prompt or parameters would be others now",
                code="stream_changed",
                status=409,
            )
        self.digest = digest

    async def followed(
        self, model: ServedModel, requests: Sequence[CompletionRequest], *, wait: bool
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        """The deltas of a request that runs elsewhere, with their text; with `wait`, all until its end.

        Raises the error with which the request ended, `StreamLeftError` or `UnavailableError`.
        """
        self.check(requests)
        processors = [OutputProcessor(each, each.output, model.tokenizer) for each in requests]
        running = len(requests)
        while running:
            unread = await self.journals.load(self.client, self.id, self.position - 1)
            if not unread:
                raise StreamLeftError("the stream is not kept any more", code="stream_not_found", status=404)
            del unread[0]  # it is known
            self.position += len(unread)
            for entry in unread:
                if isinstance(entry, list):
                    index, delta = self._decoded(entry)
                    self.now = self._replayed
                    running -= delta.finish_reason is not None
                    yield index, with_text(processors[index], delta)
                    await _let_others_run()
                elif "error" in entry:
                    raise _restored_error(entry["error"])
            if not wait:
                return
            if running and model.capacity.closing:
                raise UnavailableError("the gateway is closing", reason="closing")
            await asyncio.sleep(FOLLOW_S if running else 0)

    async def lease(self, seconds: float) -> bool:
        """Own the request, which no client waits for, for so long from now and from each append on; 0: it has ended.

        A new request is written down. Returns False if another gateway is faster, or the journal is not kept.
        """
        self.lease_s = seconds
        self.position = max(self.position, self.length)
        self.kept = await self._write({"owner": secrets.token_hex(8)}) is Written.YES
        self.position = min(self.position, 1)  # `deltas` reads the others
        self._replaying = True
        return self.kept

    async def hand_over(self) -> None:
        """End the lease now: another gateway goes on."""
        self.lease_s = HANDED_OVER_S
        await self._write()

    async def renew(self, model: ServedModel) -> None:
        """Prolong the lease, and learn what other gateways ask for. Raises `StreamLeftError`."""
        if not (self._replaying or self._appending.locked()):
            await self._append([], model, look=True)

    async def cancel(self) -> None:
        """Tell the request's owner to end it. Raises `UnavailableError`."""
        while (written := await self._write({"cancel": True})) is Written.BEHIND:
            await self._unread()
        if written is Written.LOST:
            raise _unavailable()

    async def _timed(self, deltas: AsyncGenerator[tuple[int, TextDelta]]) -> AsyncGenerator[TimedDelta]:
        async with aclosing(deltas):
            async for index, delta in deltas:
                when = self._replayed if self._replaying else int(time.time())
                yield TimedDelta(index, delta, when, new=not self._replaying)

    async def _claimed(self, completions: int, model: ServedModel) -> AsyncGenerator[tuple[int, Delta]]:
        """The deltas in the journal. Unless all completions have ended there, the request is then this gateway's."""
        self._replaying = True
        owner: Json = {"owner": secrets.token_hex(8)}
        running = completions
        while running:
            for entry in await self._unread():
                if isinstance(entry, list):
                    index, delta = self._decoded(entry)
                    running -= delta.finish_reason is not None
                    yield index, delta
                else:
                    self._heed(entry, model)
            written = await self._write(owner) if running else None
            if written is Written.LOST:
                raise _unavailable()
            if written is Written.YES:
                self._replaying = False
                return

    async def _append(self, entries: Sequence[Entry], model: ServedModel, *, look: bool = False) -> None:
        """Append as the owner, if the journal is kept. Raises `StreamLeftError`.

        `look`: ask the journal even if there is nothing to append.
        """
        if not (entries or look):
            return
        async with self._appending:
            while self.kept and (written := await self._write(*entries)) is not Written.YES:
                unread: list[Entry] = []
                with suppress(UnavailableError):
                    unread = await self._unread() if written is Written.BEHIND else []
                for each in unread:
                    assert isinstance(each, dict), "an owner's entry comes before its deltas"
                    if "owner" in each:
                        raise StreamLeftError("this stream was resumed by another connection")
                    self._heed(each, model)
                self.kept = bool(unread)

    async def _unread(self) -> list[Entry]:
        """The entries that this gateway does not know. Raises `UnavailableError`."""
        unread = await self.journals.load(self.client, self.id, self.position)
        self.position += len(unread)
        return unread

    async def _write(self, *entries: Entry) -> Written:
        """Append after the known entries; before the first one the request."""
        if not self.position:
            request = {"path": self.path, "body": self.body.decode(), "headers": dict(self.headers)}
            entries = ({**request, "created": self.created, "digest": self.digest}, *entries)
        texts = [to_json(each).decode() for each in entries]
        self._bytes += sum(map(len, texts))
        if self._bytes > MAX_JOURNAL_BYTES:
            if self.position:
                await self.journals.delete(self.client, self.id)
            return Written.LOST
        length = await self.journals.append(Append(self.client, self.id, self.position, texts, self.lease_s))
        if length <= 0:
            return Written.BEHIND if length else Written.LOST
        self.position = length
        return Written.YES

    def _heed(self, entry: Json, model: ServedModel) -> None:
        """Do what another gateway asks for. Raises the error with which the request has ended."""
        if "error" in entry:
            raise _restored_error(entry["error"])
        if "cancel" in entry:
            model.running.abort(self.client, self.id)

    def _entry(self, each: TimedDelta) -> Entry:
        index, delta, numerics = each.completion, each.delta, None
        if delta.tokens and delta.numerics != self._numerics.get(index):
            numerics = self._numerics[index] = delta.numerics or ""
        message = encode_delta(delta, "").SerializeToString()
        return [index, each.when, numerics, b64encode(message).decode()]

    def _decoded(self, entry: list[Any]) -> tuple[int, Delta]:
        index, self._replayed, numerics, message = entry
        if numerics is not None:
            self._numerics[index] = numerics
        return index, decode_delta(target_pb2.DeltaFrame.Delta.FromString(b64decode(message)))


async def gathered(items: AsyncGenerator[T]) -> AsyncGenerator[list[T]]:
    """The items of a generator. Those that come while the receiver is busy come together."""
    waiting: list[T] = []
    changed = asyncio.Event()

    async def collect() -> None:
        async with aclosing(items):
            async for item in items:
                waiting.append(item)
                changed.set()

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(lambda _: changed.set())
    try:
        while waiting or not collecting.done():
            await changed.wait()
            changed.clear()
            batch, waiting[:] = waiting.copy(), []
            if batch:
                yield batch
        collecting.result()
    finally:
        collecting.cancel()
        await asyncio.wait([collecting])


async def _let_others_run() -> None:
    """Between deltas that are all there: the server may have to notice that the client has left."""
    await asyncio.sleep(0)


def _digest(requests: Sequence[CompletionRequest]) -> str:
    """Of prompts and parameters. Defaults are left out, so a build that knows one parameter more finds the same."""
    digest = blake2b(digest_size=16)
    for each in requests:
        digest.update(array("I", each.prompt))
        sampling = each.sampling.model_dump_json(exclude_defaults=True)
        digest.update(f"{sampling}{each.output.stop}{each.cache_salt}".encode())
    return digest.hexdigest()


def _error_entry(error: ApiError) -> Json:
    names = ("message", "type", "param", "code", "status")
    return {"error": {name: getattr(error, name) for name in names}}


def _restored_error(fields: Json) -> ApiError:
    error = ApiError(fields["message"], param=fields["param"], code=fields["code"], status=fields["status"])
    error.type = fields["type"]
    return error


def _unavailable() -> UnavailableError:
    return UnavailableError(
        "this stream is kept in Redis, which does not answer now; try again soon", code="resumption_unavailable"
    )
