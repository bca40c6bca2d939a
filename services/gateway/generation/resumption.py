"""What a gateway does with a journal: it yields the deltas that are there, and goes on after the last committed token.

The events of a stream follow from its request and its deltas alone: so a gateway that reads a journal repeats them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from paceline.messages import Delta
from paceline.output_processor import OutputProcessor, TextDelta
from paceline.v1 import target_pb2
from paceline.wire.target_codec import decode_delta, encode_delta
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError, RetryLaterError, UnavailableError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.deltas import Deltas
from paceline_services.gateway.generation.journal import Entry, Journal, JournalState, StreamLeftError, unavailable
from paceline_services.gateway.generation.served_model import ServedModel, with_text
from paceline_services.gateway.http.json_body import Json

T = TypeVar("T")
FOLLOW_S = 0.1
"""How often a request that runs elsewhere is looked at."""


async def resumable(
    journal: Journal, model: ServedModel, requests: Sequence[CompletionRequest], client: ApiClient, *, streamed: bool
) -> Deltas:
    """`ServedModel.generate_all`, with each delta in the journal before it comes out of here; and before them the
    deltas that are in the journal. A request that is not streamed has no journal.

    Raises the error with which the request ended at another gateway, `StreamLeftError`, or what `generate_all` raises.
    """
    if journal.state is JournalState.NEW and not (streamed and journal.journals.available):
        journal.state = JournalState.LOST
        async with aclosing(model.generate_all(requests, client)) as deltas:
            async for item in deltas:
                journal.now = int(time.time())
                yield item
        return
    check(journal, requests)
    journal.on_cancel = partial(model.running.abort, journal.client, journal.id)
    kept, before = JournalDeltas(journal), None
    if journal.state is JournalState.REPLAYING:
        before = kept.claimed(len(requests))
        attempt = secrets.token_hex(4)  # at a target, the earlier gateway's attempt may not have ended
        requests = [replace(each, request_id=f"{each.request_id}.{attempt}") for each in requests]
    try:
        deltas = model.generate_all(requests, client, before, kept.numerics)
        async with aclosing(gathered(kept.entered(deltas))) as batches:
            async for batch in batches:
                if new := [entry for *_, entry in batch if entry]:
                    try:
                        await journal.append(*new)
                    except StreamLeftError:
                        model.running.leave(journal.client, journal.id)
                        raise
                for index, delta, when, entry in batch:
                    journal.now = when
                    yield index, delta
                    if not entry:
                        await asyncio.sleep(0)  # the server may have to notice that the client has left
    except (RetryLaterError, StreamLeftError):
        raise
    except ApiError as error:
        if journal.state is JournalState.OWNED:
            fields = ("message", "type", "param", "code", "status")
            await journal.append({"error": {name: getattr(error, name) for name in fields}})
        raise


async def followed(
    journal: Journal, model: ServedModel, requests: Sequence[CompletionRequest], *, wait: bool
) -> Deltas:
    """The deltas of a request that runs elsewhere, with their text; with `wait`, all until its end.

    Raises the error with which the request ended, `StreamLeftError` or `UnavailableError`.
    """
    check(journal, requests)
    kept = JournalDeltas(journal)
    processors = [OutputProcessor(each, each.output, model.tokenizer) for each in requests]
    running = len(requests)
    while running:
        for index, delta in kept.decoded(await journal.read()):
            journal.now = kept.when
            running -= delta.finish_reason is not None
            yield index, with_text(processors[index], delta)
            await asyncio.sleep(0)  # as above
        if not wait:
            return
        if running and model.capacity.closing:
            raise UnavailableError("the gateway is closing", reason="closing")
        await asyncio.sleep(FOLLOW_S if running else 0)


def check(journal: Journal, requests: Sequence[CompletionRequest]) -> None:
    """Raises `InvalidRequestError` if these completions are not those for which the journal was begun."""
    digest = _digest(requests)
    if journal.digest not in ("", digest):
        message = "the stream cannot be resumed: its prompt or parameters would be others now"
        raise InvalidRequestError(message, code="stream_changed", status=409)
    journal.digest = digest


class JournalDeltas:
    """The deltas of a journal. The entry of one has the index of its completion, when it came in seconds since 1970,
    the target's numerics if they are new, and its message."""

    def __init__(self, journal: Journal) -> None:
        self.when = 0
        """When the latest delta came that was decoded."""
        self._journal = journal
        self.numerics: dict[int, str] = {}
        """Of the target that drew the latest token, by completion."""

    async def claimed(self, completions: int) -> AsyncGenerator[tuple[int, Delta]]:
        """The deltas in the journal. Unless all completions have ended there, the request is then this gateway's."""
        running, unread = completions, await self._journal.read()
        while running:
            for index, delta in self.decoded(unread):
                running -= delta.finish_reason is not None
                yield index, delta
            if running and not (unread := await self._journal.claim()):
                break
        if self._journal.state is JournalState.LOST:
            self._journal.state = JournalState.REPLAYING  # events that are repeated keep their ids: clients come again
            raise unavailable()

    async def entered(self, deltas: Deltas) -> AsyncGenerator[tuple[int, TextDelta, int, Entry | None]]:
        """Each delta with the time when it came, and with its entry if it is to be appended."""
        async with aclosing(deltas):
            async for index, delta in deltas:
                if self._journal.state is JournalState.REPLAYING:
                    yield index, delta, self.when, None
                else:
                    yield index, delta, (now := int(time.time())), self._encoded(index, delta, now)

    def decoded(self, entries: Iterable[Entry]) -> Iterator[tuple[int, Delta]]:
        """The deltas among these entries. Raises the error with which the request has ended."""
        for entry in entries:
            if isinstance(entry, list):
                index, self.when, numerics, message = entry
                if numerics is not None:
                    self.numerics[index] = numerics
                yield index, decode_delta(target_pb2.DeltaFrame.Delta.FromString(b64decode(message)))
            elif "error" in entry:
                raise _restored_error(entry["error"])
            elif "cancel" in entry:
                self._journal.on_cancel()

    def _encoded(self, index: int, delta: TextDelta, when: int) -> Entry:
        numerics = None
        if delta.tokens and delta.numerics != self.numerics.get(index):
            numerics = self.numerics[index] = delta.numerics or ""
        return [index, when, numerics, b64encode(encode_delta(delta, "").SerializeToString()).decode()]


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


def _digest(requests: Sequence[CompletionRequest]) -> str:
    """Of prompts and parameters. Defaults are left out, so a build that knows one parameter more finds the same."""
    digest = blake2b(digest_size=16)
    for each in requests:
        digest.update(array("I", each.prompt))
        sampling = each.sampling.model_dump_json(exclude_defaults=True)
        digest.update(f"{sampling}{each.output.stop}{each.cache_salt}".encode())
    return digest.hexdigest()


def _restored_error(fields: Json) -> ApiError:
    error = ApiError(fields["message"], param=fields["param"], code=fields["code"], status=fields["status"])
    error.type = fields["type"]
    return error
