"""Python objects between the two processes of one service: pickles over a socket pair, each after its length.

Nothing that came over a network is ever unpickled: both ends are the service's own, and what peers send is decoded,
checked and turned into objects before it gets here.
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
_CHUNK = 2**20


class PipeClosedError(Exception):
    """The other end is gone."""


class MessageDecoder:
    """Turns bytes, as they come, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = self._buffer[_LENGTH.size : end]
            del self._buffer[:end]
            yield pickle.loads(payload)


def pack(message: object) -> bytes:
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


class MessageDispatcher:
    """Hands each message to whoever asked for its type."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], Callable[[Any], None]] = {}

    def on(self, kind: type[Message], taker: Callable[[Message], None]) -> None:
        """Call `taker` with every message that is a `kind`."""
        self._handlers[kind] = taker

    def dispatch(self, message: object) -> None:
        self._handlers[type(message)](message)


class Pipe(MessageDispatcher):
    """The computing end: for one thread, which waits only where it says how long."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = end
        self._unpacker = MessageDecoder()

    def close(self) -> None:
        self._end.close()

    def send(self, message: object) -> None:
        """Raises `PipeClosedError`."""
        try:
            self._end.sendall(pack(message))
        except OSError as error:
            raise PipeClosedError from error

    def receive_first(self, kind: type[Message]) -> Message:
        """Wait for the first message, which is to be a `kind`. Raises `PipeClosedError`."""
        got: list[Message] = []
        self.on(kind, got.append)
        while not got:
            self.receive(None)
        return got[0]

    def receive(self, timeout_s: float | None) -> None:
        """Hand out every message that has come. Waits up to `timeout_s` seconds (None: for ever) for the first bytes.

        Raises `PipeClosedError`.
        """
        while self._readable(timeout_s):
            try:
                data = self._end.recv(_CHUNK)
            except OSError as error:
                raise PipeClosedError from error
            if not data:
                raise PipeClosedError
            for message in self._unpacker.feed(data):
                self.dispatch(message)
            timeout_s = 0.0

    def _readable(self, timeout_s: float | None) -> bool:
        # Not poll or epoll, which wait in whole milliseconds: patience is often shorter.
        return bool(select.select([self._end], [], [], None if timeout_s is None else max(timeout_s, 0.0))[0])
