"""Connections that tell ranks that another one is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from paceline.tensor_parallel.lifeline import Lifeline, Listener, reach
from paceline.tensor_parallel.meeting import MeetingError, Place

LOOPBACK = "127.0.0.1"
PATIENCE_S = 20.0


@contextmanager
def accepted(others: int, *ranks: int) -> Iterator[tuple[dict[int, socket.socket], list[socket.socket]]]:
    """Rank 0's ends of these ranks' lifelines, and their own."""
    listener = Listener()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, others, PATIENCE_S)
        theirs = [reach(LOOPBACK, listener.port, rank) for rank in ranks]
        ours = waiting.result()
    try:
        yield ours, theirs
    finally:
        for end in [*ours.values(), *theirs]:
            end.close()


def test_whoever_breaks_off_is_named() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(2, 2, 1) as (ours, (second, _)):
        lifeline = Lifeline(ours, lost.put)
        second.close()
        assert lost.get(timeout=PATIENCE_S) == "rank 2 is gone"
        lifeline.close()
    assert lost.empty()


def test_whoever_says_goodbye_is_not_missed() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = Lifeline({0: end}, lost.put)
        Lifeline(ours, lost.put).close()
        theirs._thread.join(PATIENCE_S)
        assert not theirs._thread.is_alive()
        theirs.close()
    assert lost.empty()


def test_a_rank_that_goes_without_a_word_is_missed() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with accepted(1, 1) as (ours, [end]):
        theirs = Lifeline({0: end}, lost.put)
        Lifeline(ours, lost.put).abandon()
        assert lost.get(timeout=PATIENCE_S) == "rank 0 is gone"
        theirs.close()


def test_a_second_one_of_a_number_is_turned_away_while_the_first_lives() -> None:
    listener = Listener()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, 2, PATIENCE_S)
        first = reach(LOOPBACK, listener.port, 1)
        for wrong in (1, 3, 0):
            with pytest.raises(ConnectionRefusedError, match=f"it has a rank {wrong} already, or no place for one"):
                reach(LOOPBACK, listener.port, wrong)
        first.close()
        again, other = reach(LOOPBACK, listener.port, 1), reach(LOOPBACK, listener.port, 2)
        ends = waiting.result()
    assert sorted(ends) == [1, 2]
    for end in (again, other, *ends.values()):
        end.close()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:port"])
def test_a_place_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(MeetingError, match="is not HOST:PORT"):
        Place.parse(text)


def test_places_of_both_kinds() -> None:
    assert Place.parse("10.0.0.1:70") == Place("10.0.0.1", 70)
    assert Place.parse("[::1]:70") == Place("::1", 70)
