"""A process and its descendants, from /proc."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def process_and_descendants(root: int) -> Iterator[int]:
    """A process and all its descendants."""
    children = defaultdict(list)
    for entry in PROC.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            after_name = entry.read_text().rpartition(")")[2].split()
            children[int(after_name[1])].append(int(entry.parent.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children[process]
