"""Connections between ranks, and what happens when one breaks."""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from queue import SimpleQueue

import pytest

from paceline.model.parallel.rank_monitor import RankMonitor, RankMonitorListener, connect_to_rank_zero

LOOPBACK = "127.0.0.1"
PATIENCE_S = 20.0


@pytest.mark.parametrize("killed", [True, False], ids=["its process is killed", "it aborts"])
def test_a_lost_rank_is_named_and_one_that_ends_in_order_is_not_lost(killed: bool) -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(listener.accept, 2, PATIENCE_S)
        theirs = {
            rank: stack.enter_context(closing(connect_to_rank_zero(LOOPBACK, listener.port, rank))) for rank in (2, 1)
        }
        monitor = RankMonitor(waiting.result(), lost.put)
        RankMonitor({0: theirs[1]}, lost.put).close()
        theirs[2].close() if killed else RankMonitor({0: theirs[2]}, lost.put).abort()
        assert lost.get(timeout=PATIENCE_S) == "rank 2 is gone"
        monitor.close()
    assert lost.empty()


def test_a_second_process_of_a_rank_is_refused_while_the_first_is_connected() -> None:
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool, ExitStack() as stack:

        def connected(rank: int) -> socket.socket:
            return stack.enter_context(closing(connect_to_rank_zero(LOOPBACK, listener.port, rank)))

        waiting = pool.submit(listener.accept, 2, PATIENCE_S)
        first = connected(1)
        for wrong in (1, 3, 0):
            with pytest.raises(ConnectionRefusedError, match=f"it has a rank {wrong} already, or needs none"):
                connected(wrong)
        first.close()
        connected(1)
        connected(2)
        ends = waiting.result()
        assert sorted(ends) == [1, 2]
        for end in ends.values():
            end.close()


def test_stray_connections_do_not_extend_the_wait() -> None:
    """Each connection once restarted the timeout."""
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(listener.accept, 1, 0.3)
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
