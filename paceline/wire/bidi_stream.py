"""A servicer's end of a bidirectional stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from paceline.wire.outbox import Frame, Outbox

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
