"""The event loop's end of a pipe, and the model process at the other end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.ipc.pipe import MessageDecoder, MessageDispatcher, pack
from paceline.launcher import StartError, die_with_parent

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 3.0
"""Time for the process to exit by itself after its pipe has closed; then it is aborted, and after the same time
killed."""


class ModelProcessDiedError(Exception):
    """The model process ended unexpectedly."""

    def __init__(self, exit_code: int, *, hung: bool = False) -> None:
        """`hung`: we killed it, since even SIGABRT did not end it."""
        super().__init__(f"the model process ended with exit code {exit_code}")
        self.killed = exit_code == -signal.SIGKILL and not hung
        """By an operator, or by the kernel for lack of memory: not by us."""


@dataclass(frozen=True, slots=True)
class Ready:
    """First message of a model process that has started. `facts` describes its model to the service."""

    facts: object


@dataclass(frozen=True, slots=True)
class StartFailed:
    """First and last message of a model process that cannot start. `reason` becomes the text of a `StartError`."""

    reason: str


class PipeConnection(MessageDispatcher, asyncio.Protocol):
    """Sends without waiting: messages are buffered until the other end reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the pipe has closed; holds the exception if a message handler raised one."""
        self._decoder = MessageDecoder()
        self._transport: asyncio.Transport | None = None
        self._failure: Exception | None = None

    @classmethod
    async def open(cls, end: socket.socket) -> PipeConnection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, sock=end)
        return connection

    def send(self, message: object) -> None:
        """Discards the message if the pipe has closed."""
        if self._transport is not None:
            self._transport.write(pack(message))

    def close(self) -> None:
        """Close the pipe and discard unsent messages."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self.dispatch(message)
        except Exception as error:  # noqa: BLE001 - `lost` raises it
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
    """A running model process and the connection to it."""

    connection: PipeConnection
    process: asyncio.subprocess.Process
    ready: asyncio.Future[object]
    """Holds the facts of `Ready`; raises `StartError` if the process cannot start, `ModelProcessDiedError` if it ends
    first."""
    exited: asyncio.Future[None]
    """Raises, once the process has exited or its pipe has closed: `ModelProcessDiedError`, or the exception of a
    message handler."""

    def abort(self) -> None:
        """End a process that hangs, with SIGABRT. One that does not end with it is killed, as its pipe has closed."""
        _abort(self.process)
        self.connection.close()


@asynccontextmanager
async def model_process(module: str, options: object, python: str = sys.executable) -> AsyncIterator[ModelProcess]:
    """Run `python -m module FD` for as long as the context lasts; `python` is an absolute path.

    FD is the process's end of the pipe. It receives `options` first, answers with `Ready` or `StartFailed`, and exits
    when the pipe closes. On Linux the kernel kills it if this process ends first.
    """
    ours, theirs = socket.socketpair()
    connection = await PipeConnection.open(ours)
    with theirs:
        # While it loads a model, it may not read its pipe for minutes.
        command = die_with_parent([python, "-m", module, str(theirs.fileno())])
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
    ready: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    connection.on(Ready, lambda message: ready.set_result(message.facts))
    connection.on(StartFailed, lambda message: _fail(ready, StartError(message.reason)))
    connection.send(options)
    exited = asyncio.create_task(_wait_for_exit(process, connection, ready), name=f"exit of {module}")
    try:
        yield ModelProcess(connection, process, ready, exited)
    finally:
        connection.close()
        if not ready.done():
            _kill(process)  # it is loading and does not read its pipe
        await asyncio.wait([exited])
        exited.exception()  # the process was asked to exit: no error


async def _wait_for_exit(
    process: asyncio.subprocess.Process, connection: PipeConnection, ready: asyncio.Future[object]
) -> None:
    """Wait until the process exits or the pipe closes, and end the other one. Raises the reason."""
    exit_code = asyncio.ensure_future(process.wait())
    await asyncio.wait((exit_code, connection.lost), return_when=asyncio.FIRST_COMPLETED)
    connection.close()
    await asyncio.wait([exit_code], timeout=EXIT_TIMEOUT_S)
    hung = False
    if not exit_code.done():
        log.warning("process %d does not exit by itself and is aborted", process.pid)
        _abort(process)
        await asyncio.wait([exit_code], timeout=EXIT_TIMEOUT_S)
        hung = not exit_code.done()
        _kill(process)
    error = ModelProcessDiedError(await exit_code, hung=hung)
    _fail(ready, connection.lost.exception() or error)
    await connection.lost
    raise error


def _fail(future: asyncio.Future[object], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # or asyncio logs that no caller retrieved it


def _abort(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process takes a signal when it continues
            process.send_signal(number)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
