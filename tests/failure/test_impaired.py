"""The impairment proxy: delay, bandwidth, cuts, hangs, and order within each connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from tests.helpers.workers import host_and_port

SOON_S = 10.0


class Echo(BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


class EchoServer(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def impaired(impairment: Impairment | None = None) -> Iterator[ImpairmentProxy]:
    """A link to a server that returns what it receives."""
    with EchoServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host, port = server.server_address[:2]
        with ImpairmentProxy((str(host), port), impairment or Impairment(), seed=1) as link:
            yield link
        server.shutdown()


def connected(link: ImpairmentProxy) -> socket.socket:
    return socket.create_connection(host_and_port(link.address), timeout=SOON_S)


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


def test_bytes_are_delayed_and_bandwidth_is_limited() -> None:
    with impaired() as link, connected(link) as end:
        round_trip(end)
        link.impair(Impairment(delay_s=0.05))
        assert round_trip(end) >= 0.1
        link.impair(Impairment(bytes_per_s=1e6))
        assert round_trip(end, bytes(100_000)) >= 0.1


def test_the_sender_waits_for_a_slow_link() -> None:
    with impaired(Impairment(bytes_per_s=1000.0)) as link, connected(link) as end:
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.sendall(bytes(2**26))
        end.settimeout(SOON_S)
        assert link.traffic.there < 2**16
        link.impair(Impairment())
        assert len(received(end, 2**20)) == 2**20, "nothing of it was lost"


def test_closed_connections_are_forgotten() -> None:
    """But not while bytes are under way in one direction."""
    with impaired(Impairment(delay_s=0.02)) as link, connected(link) as open_end, connected(link) as end:
        round_trip(open_end)
        round_trip(end)
        assert link.open_directions == 4
        end.sendall(b"last")
        end.shutdown(socket.SHUT_WR)
        assert received(end, 5) == b"last"
        while link.open_directions > 2:
            time.sleep(0.005)
        round_trip(open_end)


def test_bytes_are_in_order_and_counted() -> None:
    sent = b"".join(bytes([i % 256]) * 97 for i in range(2000))
    with impaired(Impairment(delay_s=0.001, jitter_s=0.003)) as link, connected(link) as end:
        threading.Thread(target=end.sendall, args=(sent,), daemon=True).start()
        assert received(end, len(sent)) == sent
        assert (link.traffic.there, link.traffic.back) == (len(sent), len(sent))


def test_connections_overtake_one_another() -> None:
    """With jitter, each has a delay of its own."""
    arrived: list[int] = []
    with impaired(Impairment(jitter_s=0.3)) as link:
        ends = [connected(link) for _ in range(4)]

        def listen(number: int) -> None:
            with closing(ends[number]) as end:
                received(end, 4)
                arrived.append(number)

        threads = [threading.Thread(target=listen, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for end in ends:
            end.sendall(b"ping")
        for thread in threads:
            thread.join(SOON_S)
    assert sorted(arrived) == [0, 1, 2, 3] != arrived


def test_a_cut_closes_connections_and_refuses_new_ones() -> None:
    with impaired() as link:
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
    with impaired() as link, connected(link) as end:
        round_trip(end)
        link.hang()
        end.sendall(b"ping")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(4)
        end.settimeout(SOON_S)
        link.go_on()
        assert received(end, 4) == b"ping"
