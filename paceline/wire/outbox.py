"""Frames waiting to be sent on one link, merged into one; and a servicer's end of a bidirectional stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, Self, TypeVar

from google.protobuf.message import Message

from paceline.wire.link_errors import Congested

Frame = TypeVar("Frame", bound=Message)

RESUME_DIVISOR = 64
"""`wait_for_capacity` returns while at most this fraction of a frame waits: 1 MiB of the largest frames."""


class Outbox(Generic[Frame]):
    """An async iterator of frames, for gRPC to send.

    While the link is busy, frames are merged into the next one, so a slow link carries fewer and larger frames and
    never a queue of old ones. Merging joins repeated fields and replaces single messages. Use it from one event loop.
    """

    def __init__(
        self, frame_type: type[Frame], limit_bytes: int, on_sent: Callable[[Frame], None] = lambda _: None
    ) -> None:
        """`on_sent` is called with each frame when gRPC takes it."""
        self._frame_type = frame_type
        self._limit_bytes = limit_bytes
        self._on_sent = on_sent
        self._frame: Frame | None = None
        self._bytes = 0
        """Size of the waiting frame, or an upper bound."""
        self._sent = asyncio.Event()
        self._ready = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, frame: Frame) -> None:
        """Raises `Congested` if more waits than the peer accepts in one frame. A closed outbox discards the frame."""
        if self._closed:
            return
        if self._frame is None:
            self._frame = self._frame_type()
        for field, _ in frame.ListFields():
            if field.message_type is not None and not field.is_repeated:
                self._frame.ClearField(field.name)  # MergeFrom keeps an old value where the new one is 0
        self._frame.MergeFrom(frame)
        self._bytes += frame.ByteSize()  # measuring the merged frame each time is quadratic
        if self._bytes > self._limit_bytes:
            self._bytes = self._frame.ByteSize()  # less than the sum if messages were replaced
        if self._bytes > self._limit_bytes:
            raise Congested(f"over {self._limit_bytes} bytes wait to be sent")
        self._ready.set()

    async def wait_for_capacity(self) -> None:
        """Wait until little waits to be sent, or the outbox is closed.

        Senders of large messages call this before `put`, so that the link does not become congested.
        """
        while self._bytes > self._limit_bytes // RESUME_DIVISOR and not self._closed:
            self._sent.clear()
            await self._sent.wait()

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration.

        The waiting frame is still sent, unless there is an `error`, which the iteration raises.
        """
        if not self._closed:
            self._closed, self._error = True, error
            self._ready.set()
            self._sent.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Frame:
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        if self._frame is None:
            raise StopAsyncIteration  # closed: only `close` sets the event without a frame
        frame, self._frame, self._bytes = self._frame, None, 0
        self._sent.set()
        if not self._closed:
            self._ready.clear()
        self._on_sent(frame)
        return frame


Incoming = TypeVar("Incoming")


async def serve_bidi_stream(
    incoming: AsyncIterator[Incoming], receive: Callable[[Incoming], None], outbox: Outbox[Frame]
) -> AsyncGenerator[Frame]:
    """Yield the frames of the outbox, and call `receive` with every incoming frame meanwhile.

    Ends when the peer ends its stream or the outbox is closed. Raises what `receive` raises.
    """

    async def read() -> None:
        async for frame in incoming:
            receive(frame)

    def end(reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            outbox.close(reader.exception())

    reader = asyncio.create_task(read())
    reader.add_done_callback(end)
    try:
        async for frame in outbox:
            yield frame
    finally:
        reader.cancel()
        outbox.close()
