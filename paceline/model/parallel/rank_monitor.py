"""An idle connection from every rank to rank 0. When it breaks, the process at its other end is gone.

torch.distributed notices that late (nccl, after a timeout) or only when it is used. So a thread waits for it, and then
ends this process at once, since a pass may be waiting for the lost rank.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from paceline.host_port import HostPort
from paceline.launcher import FAILED

log = logging.getLogger(__name__)

GOODBYE = b"."
"""The last byte of an orderly end."""
WELCOME = b"+"
"""Rank 0's reply to a rank that it accepts."""
RANK = struct.Struct("<I")
CONNECT_S = 60.0
GREETING_S = 5.0
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 5, 5, 3
"""A machine that vanished is noticed after 20 s."""


def exit_process(reason: str) -> None:
    """Exit at once: other threads may wait for the lost rank forever."""
    log.critical("%s: the replica ends as a whole, start it again", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(FAILED)


class RankMonitor:
    """One rank's connections. Calls `lost` on a thread when one breaks."""

    def __init__(self, ends: Mapping[int, socket.socket], lost: Callable[[str], None]) -> None:
        """`ends`: connections by the rank at the other end."""
        self._ends = dict(ends)
        self._lost = lost
        self._over = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="rank monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End in order: the other ranks do not call `lost`."""
        self._over.set()
        for end in self._ends.values():
            with suppress(OSError):  # the other rank ended first
                end.sendall(GOODBYE)
        self.abort()

    def abort(self) -> None:
        """End without a goodbye: the other ranks call `lost`."""
        self._over.set()
        self._wake.close()
        self._thread.join()
        self._woken.close()
        for end in self._ends.values():
            end.close()

    def _watch(self) -> None:
        ranks = {end: rank for rank, end in self._ends.items()}
        while ranks:
            for end in select.select([*ranks, self._woken], [], [])[0]:
                if end is self._woken:
                    return
                rank = ranks.pop(end)
                if not _ended_in_order(end) and not self._over.is_set():
                    self._lost(f"rank {rank} is gone")


class RankMonitorListener:
    """Rank 0's listening socket, for as long as the context lasts."""

    def __init__(self, host: str) -> None:
        """`host`: this machine's address for the other ranks."""
        self._socket = HostPort(host, 0).listen()
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> RankMonitorListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, others: int, timeout_s: float) -> dict[int, socket.socket]:
        """Connections from `others` ranks, by rank. Raises `TimeoutError`."""
        ends: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(ends) < others:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left_s)
                _accept_rank(self._socket.accept()[0], ends, others)
        except BaseException:
            for end in ends.values():
                end.close()
            raise
        return ends


def connect_to_rank_zero(host: str, port: int, rank: int) -> socket.socket:
    """A connection to rank 0. Raises OSError, `ConnectionRefusedError` if rank 0 has a rank `rank` or needs none."""
    end = socket.create_connection((host, port), CONNECT_S)
    try:
        end.sendall(RANK.pack(rank))
        if end.recv(len(WELCOME)) != WELCOME:
            raise ConnectionRefusedError(f"it has a rank {rank} already, or needs none")
    except OSError:
        end.close()
        raise
    return enable_keepalive(end)


def _accept_rank(end: socket.socket, ends: dict[int, socket.socket], others: int) -> None:
    """Add a connection to `ends`, or close it if its rank is not needed."""
    rank = _read_rank(end)
    if rank in ends and _is_closed(ends[rank]):
        ends.pop(rank).close()  # the rank was started again
    if 0 < rank <= others and rank not in ends:
        with suppress(OSError):  # the rank is gone again
            end.sendall(WELCOME)
            ends[rank] = enable_keepalive(end)
            return
    end.close()


def _read_rank(end: socket.socket) -> int:
    """The rank that a new connection sends; 0 if it sends none."""
    end.settimeout(GREETING_S)
    try:
        data = end.recv(RANK.size, socket.MSG_WAITALL)
    except OSError:
        return 0
    return int(RANK.unpack(data)[0]) if len(data) == RANK.size else 0


def _is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def enable_keepalive(end: socket.socket) -> socket.socket:
    """Let the connection also break when the other machine is silent."""
    end.settimeout(None)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", KEEPALIVE_TRIES),
    ):
        if hasattr(socket, option):  # not on every system
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return end


def _ended_in_order(end: socket.socket) -> bool:
    try:
        return end.recv(1) == GOODBYE
    except OSError:
        return False
