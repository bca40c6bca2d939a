"""Addresses of a rendezvous: text, and where rank 0 then listens."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

import pytest

from paceline.host_port import LISTENING_PORTS, HostPort, free_address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:port", "host:0", "host:65536"])
def test_text_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        HostPort.parse(text)


@pytest.mark.parametrize("text", ["10.0.0.1:70", "[::1]:70", "name:70"])
def test_addresses_of_all_kinds(text: str) -> None:
    address = HostPort.parse(text)
    assert str(address) == text
    assert address == HostPort(text.removesuffix(":70").strip("[]"), 70)
    assert address.loopback == (text == "[::1]:70")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False), ("a-name.invalid", False)],
)
def test_it_listens_everywhere_only_if_the_address_is_not_this_machine_s(host: str, loopback: bool) -> None:
    try:
        listener = HostPort(host, 0).listen()
    except OSError as error:
        if ":" in host and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("no IPv6 here")
        raise
    with listener:
        name, port, *_ = listener.getsockname()
        address = ipaddress.ip_address(name)
        assert (address.is_loopback, address.is_unspecified) == (loopback, not loopback)
        with socket.create_connection((name if loopback else "127.0.0.1", port)):
            pass


def test_a_free_port_is_none_that_outgoing_connections_get(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(random, "sample", lambda ports, count: [port, *ports[:count]])
        assert free_address("127.0.0.1").port in LISTENING_PORTS
