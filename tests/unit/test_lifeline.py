"""Connections that tell ranks that another one is gone."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from paceline.model.parallel.host_port import HostPort
from paceline.model.parallel.rank_monitor import RankMonitor, RankMonitorListener, connect_to_rank_zero

LOOPBACK = "127.0.0.1"
PATIENCE_S = 20.0


@contextmanager
def accepted(others: int, *ranks: int) -> Iterator[tuple[dict[int, socket.socket], list[socket.socket]]]:
    """Rank 0's ends of these ranks' lifelines, and their own."""
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, others, PATIENCE_S)
        theirs = [connect_to_rank_zero(LOOPBACK, listener.port, rank) for rank in ranks]
        ours = waiting.result()
    try:
        yield ours, theirs
    finally:
        for end in [*ours.values(), *theirs]:
            end.close()


def test_whoever_breaks_off_is_named() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(2, 2, 1) as (ours, (second, _)):
        lifeline = RankMonitor(ours, lost.put)
        second.close()
        assert lost.get(timeout=PATIENCE_S) == "rank 2 is gone"
        lifeline.close()
    assert lost.empty()


def test_whoever_says_goodbye_is_not_missed() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = RankMonitor({0: end}, lost.put)
        RankMonitor(ours, lost.put).close()
        theirs._thread.join(PATIENCE_S)
        assert not theirs._thread.is_alive()
        theirs.close()
    assert lost.empty()


def test_a_rank_that_goes_without_a_word_is_missed() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = RankMonitor({0: end}, lost.put)
        RankMonitor(ours, lost.put).abort()
        assert lost.get(timeout=PATIENCE_S) == "rank 0 is gone"
        theirs.close()


def test_a_second_one_of_a_number_is_turned_away_while_the_first_lives() -> None:
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, 2, PATIENCE_S)
        first = connect_to_rank_zero(LOOPBACK, listener.port, 1)
        for wrong in (1, 3, 0):
            with pytest.raises(ConnectionRefusedError, match=f"it has a rank {wrong} already, or no place for one"):
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


def test_whoever_knocks_does_not_make_the_wait_longer() -> None:
    """Each connection used to begin the wait anew."""
    with RankMonitorListener(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(listener.accept, 1, 0.5)
        while not waiting.done() and time.monotonic() - began < PATIENCE_S:
            with suppress(ConnectionError), socket.create_connection((LOOPBACK, listener.port)):
                time.sleep(0.05)
        assert waiting.done()
        with pytest.raises(TimeoutError):
            waiting.result()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:port", "host:0", "host:65536"])
def test_a_place_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        HostPort.parse(text)


@pytest.mark.parametrize("text", ["10.0.0.1:70", "[::1]:70", "name:70"])
def test_places_of_all_kinds(text: str) -> None:
    place = HostPort.parse(text)
    assert str(place) == text
    assert place == HostPort(text.removesuffix(":70").strip("[]"), 70)
    assert place.loopback == (text == "[::1]:70")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_address_of_this_machine_is_listened_at_alone(host: str) -> None:
    with listening(host) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@pytest.mark.skipif(sys.platform != "linux", reason="only there is all of 127.0.0.0/8 this machine")
def test_rank_0_listens_where_it_is_reached_alone() -> None:
    with RankMonitorListener(LOOPBACK) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port), PATIENCE_S)


@pytest.mark.parametrize("host", ["192.0.2.1", "a-name.invalid"])
def test_what_others_call_this_machine_may_not_be_its_address(host: str) -> None:
    with listening(host) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_unspecified
        with socket.create_connection((LOOPBACK, listener.getsockname()[1])):
            pass


def listening(host: str) -> socket.socket:
    try:
        return HostPort(host, 0).listen()
    except OSError as error:
        if ":" in host and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("no IPv6 here")
        raise
