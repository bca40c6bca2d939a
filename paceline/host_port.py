"""Addresses to listen at: of a rendezvous, and free ones."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

LOCALHOST = "localhost"
"""The only name that means the same on every machine."""
LISTENING_PORTS = range(20_000, 32_000)
"""Linux gives ports from 32768 on to outgoing connections, others from 49152 on."""
PORT_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class HostPort:
    """The rendezvous of ranks, at rank 0: `HOST:PORT`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Raises ValueError if `text` is not HOST:PORT."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"rendezvous {text!r} is not HOST:PORT: name rank 0's address and a free port on it")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        return self.host == LOCALHOST or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def listen(self) -> socket.socket:
        """Listen at this address alone, if it is this machine's, else on every interface. Port 0: the system chooses.

        It may not be this machine's: a router may translate it, and a name may resolve differently on other machines.
        Raises OSError.
        """
        if self.host == LOCALHOST or _is_address(self.host):
            family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            try:
                return socket.create_server(address, family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", self.port))


def listen_at_free_port(listen: Callable[[int], socket.socket]) -> socket.socket:
    """Listen at a port that the system gives to no outgoing connection. Raises OSError, as `listen` does.

    Such a connection could take the port between the choice and the start of the process that is to listen there,
    which imports torch first. `listen`: listens at a port; at 0, one that the system chooses.
    """
    for port in random.sample(LISTENING_PORTS, PORT_ATTEMPTS):
        with suppress(OSError):
            return listen(port)
    return listen(0)


def free_address(host: str) -> HostPort:
    """A free port of `host`, as `listen_at_free_port` chooses it. Raises OSError."""
    with listen_at_free_port(lambda port: HostPort(host, port).listen()) as listener:
        return HostPort(host, int(listener.getsockname()[1]))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
