"""Python objects between the two processes of one service: length-prefixed pickles over a socket pair.

Bytes from a network are never unpickled. Both ends belong to the same service; messages of peers are decoded and
checked before they enter the pipe.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Message = TypeVar("Message")

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 2**16


class PipeClosedError(Exception):
    """The other end has closed the pipe."""


class MessageDecoder:
    """Turns a byte stream, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = self._buffer[_LENGTH.size : end]
            del self._buffer[:end]
            yield pickle.loads(payload)


def pack(message: object) -> bytes:
    """Return the message as `MessageDecoder` reads it.

    Named tuples travel as plain ones behind their names: pickle looks the classes of other messages up by import.
    """
    if isinstance(message, tuple):
        message = (type(message).__name__, *message)
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


class MessageDispatcher:
    """Calls one handler per message type."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], Callable[[Any], None]] = {}
        self._kinds: dict[str, type[Any]] = {}
        """By name."""

    def on(self, kind: type[Message], handler: Callable[[Message], None]) -> None:
        """Register the handler for messages whose type is exactly `kind`."""
        self._handlers[kind] = handler
        self._kinds[kind.__name__] = kind

    def dispatch(self, message: object) -> None:
        if type(message) is tuple:  # a named tuple, see `pack`
            name, *fields = message
            message = self._kinds[name](*fields)
        self._handlers[type(message)](message)


class Pipe(MessageDispatcher):
    """The model process's end, for use from one thread."""

    def __init__(self, end: socket.socket) -> None:
        """`end` is blocking, without a timeout of Python's: that would cost a system call more for each message."""
        super().__init__()
        self._end = end
        self._decoder = MessageDecoder()

    def close(self) -> None:
        self._end.close()

    def send(self, message: object) -> None:
        """Raises `PipeClosedError`."""
        try:
            self._end.sendall(pack(message))
        except OSError as error:
            raise PipeClosedError from error

    def receive_first(self, kind: type[Message]) -> Message:
        """Wait for the first message, which must be a `kind`, and return it. Raises `PipeClosedError`."""
        received: list[Message] = []
        self.on(kind, received.append)
        while not received:
            self.receive(None)
        return received[0]

    def receive(self, timeout_s: float | None) -> None:
        """Dispatch every message that has arrived. Waits up to `timeout_s` seconds for the first bytes; None: forever.

        Raises `PipeClosedError`.
        """
        if timeout_s != 0.0:
            # Not poll or epoll: their resolution is a millisecond, and the engine often waits less.
            select.select([self._end], [], [], None if timeout_s is None else max(timeout_s, 0.0))
        more = True
        while more:
            data = self._receive_now()
            for message in self._decoder.feed(data):
                self.dispatch(message)
            more = len(data) == _CHUNK_BYTES

    def _receive_now(self) -> bytes:
        """The bytes that have arrived, up to `_CHUNK_BYTES`."""
        try:
            data = self._end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise PipeClosedError from error
        if not data:
            raise PipeClosedError
        return data
