"""Addresses of a rendezvous: text, and where rank 0 then listens."""

from __future__ import annotations

import errno
import ipaddress
import socket

import pytest

from paceline.model.parallel.host_port import HostPort

LOOPBACK = "127.0.0.1"


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_it_listens_at_an_address_of_this_machine_alone(host: str) -> None:
    with listening(host) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@pytest.mark.parametrize("host", ["192.0.2.1", "a-name.invalid"])
def test_it_listens_everywhere_if_the_address_is_not_this_machine_s(host: str) -> None:
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
