"""An address at which ranks meet."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

LOCALHOST = "localhost"
"""The one name that means the same everywhere."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where ranks meet, at rank 0: `HOST:PORT`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Raises ValueError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"rendezvous {text!r} is not HOST:PORT: name rank 0's address, and a port free there")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can come here."""
        return self.host == LOCALHOST or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def listen(self) -> socket.socket:
        """At this address and no other, if it is this machine's; port 0: the system chooses. Raises OSError.

        It may not be: an address can be translated on its way here, and a name mean another one elsewhere than here.
        Then on every interface.
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


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
