"""Networks that can be cut: a network namespace, connected to this machine's by one virtual cable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """`inside`: its only address; `outside`: this machine's address for processes inside."""

    name: str
    inside: str
    outside: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Prefix of a command that runs inside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Drop all packets silently."""
        _ip("link", "set", _cable(self.name), "down")

    def heal(self) -> None:
        _ip("link", "set", _cable(self.name), "up")


@contextmanager
def network(number: int) -> Iterator[Network]:
    """A network for as long as the context lasts. `number`: below 64, unique in this process."""
    name = f"pl{os.getpid()}n{number}"
    subnet = f"198.18.{os.getpid() % 256}"  # RFC 2544: reserved for tests of networks
    made = Network(name, f"{subnet}.{4 * number + 2}", f"{subnet}.{4 * number + 1}")
    there = f"{name}i"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", _cable(name), "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", name)
        _ip("address", "add", f"{made.outside}/30", "dev", _cable(name))
        _ip("link", "set", _cable(name), "up")
        for command in (("address", "add", f"{made.inside}/30", "dev", there), ("link", "set", there, "up")):
            _ip("-n", name, *command)
        _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", _cable(name))
        _ip("netns", "delete", name)


def possible() -> bool:
    """Whether this machine can make networks: it needs root, namespaces and iproute2."""
    try:
        with network(0):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _cable(name: str) -> str:
    """The cable's outside interface. Interface names have at most 15 characters."""
    return f"{name}o"


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
