"""A process and its descendants: their ids, memory and CPU time, from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def tree_pss_mb(root: int | None = None) -> float | None:
    """Proportional set size of a process, or this one, and all its descendants, in MB (10^6 bytes); None outside Linux.

    A page that several processes share counts once in all, unlike in the sum of their resident sizes.
    """
    if not (PROC / "self" / "smaps_rollup").exists():
        return None
    return sum(map(_pss_kib, process_and_descendants(root or os.getpid()))) * 1024 / 1e6


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


def cpu_s(process: int) -> float:
    """Seconds of CPU time that a process has used, with all its threads; 0 once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        after_name = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _pss_kib(process: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
