"""The event loop's end of a pipe, and the process at the other end of it."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.ipc.pipe import MessageDecoder, MessageDispatcher, pack
from paceline.launcher import die_with_parent

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 3.0
"""How long the process may take to notice that nobody needs it any more."""


class ModelProcessDiedError(Exception):
    """The process that computes ended by itself."""


class ModelProcessStartError(Exception):
    """It could not begin; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a process that can begin. `about` is what the service has to know of it."""

    facts: object


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The first and last message of one that cannot."""

    reason: str


class PipeConnection(MessageDispatcher, asyncio.Protocol):
    """Never waits: what the other end does not take at once is kept for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the pipe is closed; with the exception if that is because a message could not be handled here."""
        self._unpacker = MessageDecoder()
        self._transport: asyncio.Transport | None = None
        self._failure: Exception | None = None

    @classmethod
    async def open(cls, end: socket.socket) -> PipeConnection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, sock=end)
        return connection

    def send(self, message: object) -> None:
        """Messages for an end that is gone are forgotten."""
        if self._transport is not None:
            self._transport.write(pack(message))

    def close(self) -> None:
        """What was not sent yet never will be."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self.dispatch(message)
        except Exception as error:  # noqa: BLE001 - whoever waits for `lost` gets it
            self._failure = error
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._failure is not None:
            self.lost.set_exception(self._failure)
        else:
            self.lost.set_result(None)


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """A process that computes, and the connection to it."""

    connection: PipeConnection
    process: asyncio.subprocess.Process
    exited: asyncio.Future[None]
    """Done when the process is, or cannot be talked to; with what is known of the reason."""
    _first: asyncio.Future[Ready | StartFailed]

    async def ready(self) -> object:
        """What `Ready` brought. Raises `ModelProcessStartError` if it cannot begin, `ModelProcessDiedError` if it
        ended."""
        await asyncio.wait((self._first, self.exited), return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            self.exited.result()
        first = await self._first
        if isinstance(first, StartFailed):
            raise ModelProcessStartError(first.reason)
        return first.facts


@asynccontextmanager
async def model_process(module: str, begin: object) -> AsyncIterator[ModelProcess]:
    """Run `python -m module FD` for as long as the context lasts.

    FD is its end of the pipe. The first message there is `begin`; its first answer has to be `Ready` or `StartFailed`.
    It is to end when the pipe closes; on Linux it does in any case when this process has ended.
    """
    ours, theirs = socket.socketpair()
    connection = await PipeConnection.open(ours)
    with theirs:
        # Dependent, since there may be minutes in which it does not look at its pipe.
        command = die_with_parent([sys.executable, "-m", module, str(theirs.fileno())])
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
    first: asyncio.Future[Ready | StartFailed] = asyncio.get_running_loop().create_future()
    connection.on(Ready, first.set_result)
    connection.on(StartFailed, first.set_result)
    connection.send(begin)
    ended = asyncio.create_task(_wait_for_exit(process, connection), name=f"end of {module}")
    try:
        yield ModelProcess(connection, process, ended, first)
    finally:
        connection.close()
        if not first.done():
            _kill(process)  # it is loading, and would not look up until it is done
        await asyncio.wait([ended])
        ended.exception()  # it was asked to go; whoever wanted to know more has looked


async def _wait_for_exit(process: asyncio.subprocess.Process, connection: PipeConnection) -> None:
    """Whichever goes first, process or pipe, takes the other along. Raises the reason."""
    gone = asyncio.ensure_future(process.wait())
    await asyncio.wait((gone, connection.lost), return_when=asyncio.FIRST_COMPLETED)
    connection.close()
    await asyncio.wait([gone], timeout=EXIT_TIMEOUT_S)
    if not gone.done():
        log.warning("process %d does not end by itself and is killed", process.pid)
        _kill(process)
    code = await gone
    await connection.lost
    raise ModelProcessDiedError(f"the process that computes ended with exit code {code}")


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
