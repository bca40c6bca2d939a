"""Connections between ranks, and what happens when one breaks."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from paceline.model.parallel.rank_monitor import RankMonitor, RankMonitorListener, connect_to_rank_zero

LOOPBACK = "127.0.0.1"
PATIENCE_S = 20.0


@contextmanager
def accepted(others: int, *ranks: int) -> Iterator[tuple[dict[int, socket.socket], list[socket.socket]]]:
    """Both ends of the connections between rank 0 and these ranks: rank 0's by rank, and theirs."""
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, others, PATIENCE_S)
        theirs = [connect_to_rank_zero(LOOPBACK, listener.port, rank) for rank in ranks]
        ours = waiting.result()
    try:
        yield ours, theirs
    finally:
        for end in [*ours.values(), *theirs]:
            end.close()


def test_a_lost_rank_is_named() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(2, 2, 1) as (ours, (second, _)):
        monitor = RankMonitor(ours, lost.put)
        second.close()
        assert lost.get(timeout=PATIENCE_S) == "rank 2 is gone"
        monitor.close()
    assert lost.empty()


def test_a_rank_that_ends_in_order_is_not_lost() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = RankMonitor({0: end}, lost.put)
        RankMonitor(ours, lost.put).close()
        theirs._thread.join(PATIENCE_S)
        assert not theirs._thread.is_alive()
        theirs.close()
    assert lost.empty()


def test_a_rank_that_aborts_is_lost() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = RankMonitor({0: end}, lost.put)
        RankMonitor(ours, lost.put).abort()
        assert lost.get(timeout=PATIENCE_S) == "rank 0 is gone"
        theirs.close()


def test_a_second_process_of_a_rank_is_refused_while_the_first_is_connected() -> None:
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, 2, PATIENCE_S)
        first = connect_to_rank_zero(LOOPBACK, listener.port, 1)
        for wrong in (1, 3, 0):
            with pytest.raises(ConnectionRefusedError, match=f"it has a rank {wrong} already, or needs none"):
                connect_to_rank_zero(LOOPBACK, listener.port, wrong)
        first.close()
        again, other = (
            connect_to_rank_zero(LOOPBACK, listener.port, 1),
            connect_to_rank_zero(LOOPBACK, listener.port, 2),
        )
        ends = waiting.result()
    assert sorted(ends) == [1, 2]
    for end in (again, other, *ends.values()):
        end.close()


def test_stray_connections_do_not_extend_the_wait() -> None:
    """Each connection once restarted the timeout."""
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(listener.accept, 1, 0.5)
        while not waiting.done() and time.monotonic() - began < PATIENCE_S:
            with suppress(ConnectionError), socket.create_connection((LOOPBACK, listener.port)):
                time.sleep(0.05)
        assert waiting.done()
        with pytest.raises(TimeoutError):
            waiting.result()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is loopback on Linux only")
def test_rank_zero_listens_at_its_own_address_alone() -> None:
    with RankMonitorListener(LOOPBACK) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port), PATIENCE_S)
