"""Ports for processes of one kind, several of which may run on one node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count


class PortAllocator:
    """The first process on a node gets port `first`, the second one the next port, and so on."""

    def __init__(self, first: int) -> None:
        """`first` 0: the system chooses all ports."""
        self._first = first
        self._taken: set[tuple[str, int]] = set()

    @contextmanager
    def reserve(self, address: str) -> Iterator[int]:
        """The lowest free port on the node, for as long as the context lasts."""
        if not self._first:
            yield 0
            return
        port = next(port for port in count(self._first) if (address, port) not in self._taken)
        self._taken.add((address, port))
        try:
            yield port
        finally:
            self._taken.remove((address, port))
