"""A bad network for benchmarks and tests: relays TCP with delay, jitter, limited bandwidth, cuts and hangs.

Each direction of a connection delivers every byte `delay_s` after it came (and up to `jitter_s` more,
drawn once per connection: connections overtake one another, as on different paths, while each stays in
order), and no faster than `bytes_per_s`; it does not read more than that either, so a faster sender has to wait.
`cut` closes open connections and refuses new ones; `hang` delivers nothing until `go_on`. It uses threads, because an
event loop's timers are as coarse as the delays to measure.
"""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK = 2**16
TICK_S = 0.02
"""Throttled data passes in pieces of this duration."""


@dataclass(frozen=True, slots=True)
class Impairment:
    """Delays and bandwidth of one direction. 0 bytes per second: unlimited."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Bytes relayed so far: from the client, and back."""

    there: int = 0
    back: int = 0

    @property
    def total(self) -> int:
        return self.there + self.back


class ImpairmentProxy:
    """Listens on a loopback port of its own; relays to one address. A context manager."""

    def __init__(self, to: tuple[str, int], impairment: Impairment, port: int = 0, seed: int = 0) -> None:
        self.traffic = Traffic()
        self._to = to
        self.impairment = impairment
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: set[_Direction] = set()
        self._lock = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        self._refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ImpairmentProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._passing.set()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def open_directions(self) -> int:
        """Two for each open connection."""
        return len(self._open)

    def impair(self, impairment: Impairment) -> None:
        """Change the impairment from now on. Open connections keep their share of jitter."""
        self.impairment = impairment

    def cut(self) -> None:
        """End every connection, and refuse new ones."""
        self._refusing = True
        with self._lock:
            for direction in self._open:
                _close(direction.source)
            self._open.clear()

    def mend(self) -> None:
        """Accept connections again."""
        self._refusing = False

    def hang(self) -> None:
        """Deliver nothing and close nothing, as if cables were unplugged."""
        self._passing.clear()

    def go_on(self) -> None:
        """Deliver the backlog, and go on."""
        self._passing.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            self._relay(near, far)

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        jitter = self._random.random()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        directions = _Direction(self, near, far, jitter, "there"), _Direction(self, far, near, jitter, "back")
        with self._lock:
            self._open.update(directions)
        for direction in directions:
            direction.start()

    def forget(self, ended: _Direction) -> None:
        """Remove a direction; close the connection once both directions have ended."""
        with self._lock:
            self._open.discard(ended)
            if any(each.source is ended.sink for each in self._open):
                return
        for end in (ended.source, ended.sink):
            _close(end)

    def count(self, direction: str, size: int) -> None:
        with self._lock:
            setattr(self.traffic, direction, getattr(self.traffic, direction) + size)

    def wait_to_pass(self) -> None:
        self._passing.wait()


@dataclass(slots=True, eq=False)
class _Direction:
    """Two threads: one receives bytes and computes when they are due, the other delivers them."""

    link: ImpairmentProxy
    source: socket.socket
    sink: socket.socket
    jitter: float
    """Its share of `jitter_s`, 0 to 1."""
    name: str
    due: queue.SimpleQueue[tuple[float, bytes]] = field(default_factory=queue.SimpleQueue)

    def start(self) -> None:
        for body in (self._take, self._deliver):
            threading.Thread(target=body, daemon=True).start()

    def _take(self) -> None:
        data = b""
        while data := data or self._receive():
            rate = self.link.impairment.bytes_per_s
            size = int(rate * TICK_S) + 1 if rate else len(data)
            piece, data = data[:size], data[size:]
            passing_s = len(piece) / rate if rate else 0.0
            self._put(passing_s, piece)
            if passing_s:
                time.sleep(passing_s)
        self._put(0.0, b"")

    def _receive(self) -> bytes:
        """Empty at the end."""
        try:
            return self.source.recv(CHUNK)
        except OSError:
            return b""

    def _put(self, passing_s: float, data: bytes) -> None:
        network = self.link.impairment
        self.due.put((time.monotonic() + passing_s + network.delay_s + self.jitter * network.jitter_s, data))

    def _deliver(self) -> None:
        while data := self._next():
            self.link.count(self.name, len(data))
            try:
                self.sink.sendall(data)
            except OSError:
                _close(self.source)
                break
        else:
            with suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)
        self.link.forget(self)

    def _next(self) -> bytes:
        """Wait until the next data is due; empty at the end."""
        when, data = self.due.get()
        time.sleep(max(0.0, when - time.monotonic()))
        self.link.wait_to_pass()
        return data


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
