"""Both ends of a pipe in one process, for tests that run a model process's loop on a thread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from paceline.ipc.model_process import PipeConnection
from paceline.ipc.pipe import Pipe


@dataclass(frozen=True)
class Note:
    """A message."""

    text: str


@contextmanager
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    """Two connected ends of a model process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours), Pipe(theirs)


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[PipeConnection, Pipe]]:
    """The event loop's end and the model process's end."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = await PipeConnection.open(ours)
        try:
            yield connection, Pipe(theirs)
        finally:
            connection.close()


@asynccontextmanager
async def computing(connection: PipeConnection, run: Callable[[], None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a loop on a thread until the context ends, which closes its pipe. Raises what the loop raises."""
    task = asyncio.create_task(asyncio.to_thread(run))
    try:
        yield task
    finally:
        connection.close()
        await task
