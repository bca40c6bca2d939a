"""This process and everything it started: which those are, and how much memory they really take."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def tree_pss_mb() -> float | None:
    """Proportional set size of this process and all its descendants, in MB (10^6 bytes); None outside Linux.

    A page that several of them share counts once in all, which the sum of their resident sizes gets wrong.
    """
    if not (PROC / "self" / "smaps_rollup").exists():
        return None
    return sum(map(_pss_kib, tree(os.getpid()))) * 1024 / 1e6


def tree(root: int) -> Iterator[int]:
    """A process and all its descendants."""
    children = defaultdict(list)
    for entry in PROC.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            after_name = entry.read_text().rpartition(")")[2].split()
            children[int(after_name[1])].append(int(entry.parent.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children[process]


def _pss_kib(process: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
