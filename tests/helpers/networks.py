"""Networks that can be cut: a namespace of the kernel's, joined to everybody else's by one cable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """`inside` is its one address; `outside` is where those within reach this machine."""

    name: str
    inside: str
    outside: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        _ip("link", "set", _cable(self.name), "down")

    def heal(self) -> None:
        _ip("link", "set", _cable(self.name), "up")


@contextmanager
def network(number: int) -> Iterator[Network]:
    """For as long as the context lasts. `number`: tells it from others of this process, below 64."""
    name = f"pl{os.getpid()}n{number}"
    subnet = f"198.18.{os.getpid() % 256}"  # RFC 2544: for tests of networks, nobody's address
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
    """Whether this machine lets us: it takes root, the kernel's leave and iproute2."""
    try:
        with network(0):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _cable(name: str) -> str:
    """The end of it that is outside. Names of interfaces have 15 characters at most."""
    return f"{name}o"


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
