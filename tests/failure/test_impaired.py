"""The impairment proxy: delay, bandwidth, cuts, hangs, and order within each connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy

SOON_S = 10.0


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """A server that returns what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with closing(connection):
                try:
                    while data := connection.recv(4096):
                        connection.sendall(data)
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def connected(link: ImpairmentProxy) -> socket.socket:
    host, _, port = link.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOON_S)


def received(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := end.recv(count - len(data))):
        data += part
    return data


def round_trip(end: socket.socket, data: bytes = b"ping") -> float:
    started_at = time.monotonic()
    end.sendall(data)
    assert received(end, len(data)) == data
    return time.monotonic() - started_at


def test_bytes_are_delayed() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment(delay_s=0.05)) as link, connected(link) as end:
        assert round_trip(end) >= 0.1


def test_bandwidth_is_limited() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment(bytes_per_s=1e6)) as link, connected(link) as end:
        assert round_trip(end, bytes(100_000)) >= 0.1


def test_the_sender_waits_for_a_slow_link() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment(bytes_per_s=1000.0)) as link, connected(link) as end:
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.sendall(bytes(2**26))
        end.settimeout(SOON_S)
        assert link.traffic.there < 2**16
        link.impair(Impairment())
        assert len(received(end, 2**20)) == 2**20, "nothing of it was lost"


def test_closed_connections_are_forgotten() -> None:
    """But not while bytes are under way in one direction."""
    with echo() as server, ImpairmentProxy(server, Impairment(delay_s=0.02)) as link:
        ends = [connected(link) for _ in range(3)]
        for end in ends:
            round_trip(end)
        assert link.open_directions == 6
        ends[0].close()
        ends[1].sendall(b"last")
        ends[1].shutdown(socket.SHUT_WR)
        assert received(ends[1], 5) == b"last"
        while link.open_directions > 2:
            time.sleep(0.005)
        round_trip(ends[2])
        link.cut()
        assert link.open_directions == 0
        for end in ends:
            end.close()


def test_bytes_are_in_order_and_counted() -> None:
    sent = b"".join(bytes([i % 256]) * 97 for i in range(2000))
    with (
        echo() as server,
        ImpairmentProxy(server, Impairment(delay_s=0.001, jitter_s=0.003)) as link,
        connected(link) as end,
    ):
        threading.Thread(target=end.sendall, args=(sent,), daemon=True).start()
        assert received(end, len(sent)) == sent
        assert (link.traffic.there, link.traffic.back) == (len(sent), len(sent))


def test_an_impairment_may_change() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment()) as link, connected(link) as end:
        round_trip(end)
        link.impair(Impairment(delay_s=0.05))
        assert round_trip(end) >= 0.1


def test_connections_overtake_one_another() -> None:
    """With jitter, each has a delay of its own."""
    with echo() as server, ImpairmentProxy(server, Impairment(jitter_s=0.3), seed=1) as link:
        ends = [connected(link) for _ in range(4)]
        arrived: list[int] = []

        def listen(number: int) -> None:
            received(ends[number], 4)
            arrived.append(number)

        threads = [threading.Thread(target=listen, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for end in ends:
            end.sendall(b"ping")
        for thread in threads:
            thread.join(SOON_S)
        assert sorted(arrived) == [0, 1, 2, 3] != arrived
        for end in ends:
            end.close()


def test_a_cut_closes_connections_and_refuses_new_ones() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment()) as link:
        with connected(link) as end:
            round_trip(end)
            link.cut()
            assert end.recv(1) == b""
        with connected(link) as end:
            assert end.recv(1) == b""
        link.mend()
        with connected(link) as end:
            round_trip(end)


def test_a_network_that_hangs_loses_nothing() -> None:
    with echo() as server, ImpairmentProxy(server, Impairment()) as link, connected(link) as end:
        round_trip(end)
        link.hang()
        end.sendall(b"ping")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(4)
        end.settimeout(SOON_S)
        link.go_on()
        assert received(end, 4) == b"ping"
