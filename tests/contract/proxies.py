"""A TCP proxy that ends all its connections when it stops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def proxy(connect: Callable[[], Awaitable[Streams]], *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Yield the proxy's port. `connect` connects to the server, and `tls` serves the clients.

    A connection is closed on both sides when one side closes it.
    """
    serving: set[asyncio.Task[None]] = set()
    """Keeps a reference to the task of each connection."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer):
            behind, back = await connect()
            async with _closing(back):
                directions = [asyncio.create_task(each) for each in (_pass_on(reader, back), _pass_on(behind, writer))]
                try:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in directions:
                        each.cancel()
                    await asyncio.wait(directions)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
