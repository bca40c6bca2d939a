"""Ports that processes of one kind take where several of them may share a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count


class PortAllocator:
    """On each node the first process takes port `first`, the one beside it the next, and so on."""

    def __init__(self, first: int) -> None:
        """0: let the system choose all of them."""
        self._first = first
        self._taken: set[tuple[str, int]] = set()

    @contextmanager
    def reserve(self, address: str) -> Iterator[int]:
        """The lowest that nobody has there, for as long as the context lasts."""
        if not self._first:
            yield 0
            return
        port = next(each for each in count(self._first) if (address, each) not in self._taken)
        self._taken.add((address, port))
        try:
            yield port
        finally:
            self._taken.remove((address, port))
