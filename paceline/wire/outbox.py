"""What waits to be sent on one link, merged into one frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from google.protobuf.message import Message

from paceline.wire.link_errors import Congested

Frame = TypeVar("Frame", bound=Message)

RESUME_DIVISOR = 64
"""There is room while no more than this part of a frame waits: with the largest frames, a megabyte."""


class Outbox(Generic[Frame]):
    """An async iterator of frames, for gRPC to send. While the link is busy, whatever is put is merged into
    the next frame: a slow link carries fewer and larger frames, and never a queue of old ones.

    Lists are joined, single messages replaced as a whole. Use it from one event loop.
    """

    def __init__(self, empty: type[Frame], limit_bytes: int, leaving: Callable[[Frame], None] = lambda _: None) -> None:
        """`leaving` is told of each frame when it is taken."""
        self.frames_sent = 0
        """Frames that left so far."""
        self._empty = empty
        self._limit_bytes = limit_bytes
        self._on_sent = leaving
        self._frame: Frame | None = None
        self._bytes = 0
        """Of the frame, or more."""
        self._sent = asyncio.Event()
        self._ready = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, frame: Frame) -> None:
        """Raises `Congested` if more waits than the peer takes in one frame. A closed outbox forgets it."""
        if self._closed:
            return
        if self._frame is None:
            self._frame = self._empty()
        for field, _ in frame.ListFields():
            if field.message_type is not None and not field.is_repeated:
                self._frame.ClearField(field.name)  # merging would keep an old value where the new one is zero
        self._frame.MergeFrom(frame)
        self._bytes += frame.ByteSize()  # asking the whole frame each time would take ever longer
        if self._bytes > self._limit_bytes:
            self._bytes = self._frame.ByteSize()  # less, where messages were replaced
        if self._bytes > self._limit_bytes:
            raise Congested(f"over {self._limit_bytes} bytes wait to be sent")
        self._ready.set()

    async def wait_for_capacity(self) -> None:
        """Wait until what waits is a small part of what the peer takes in one frame, or the outbox is closed.

        Whoever has much to say waits here, so that nothing is congested and the event loop gets a turn in between.
        """
        while self._bytes > self._limit_bytes // RESUME_DIVISOR and not self._closed:
            self._sent.clear()
            await self._sent.wait()

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration, with `error` if given. What waits is still sent, but not before an error."""
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
            raise StopAsyncIteration  # closed, since nothing else sets the event without a frame
        frame, self._frame, self._bytes = self._frame, None, 0
        self._sent.set()
        if not self._closed:
            self._ready.clear()
        self.frames_sent += 1
        self._on_sent(frame)
        return frame
