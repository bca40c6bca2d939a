"""Reserves CPU cores for targets where one machine runs a whole deployment.

A target's step is one long computation. A gateway or draft that takes its core away for half a millisecond delays every
token, so each target gets cores of its own, as vLLM binds its threads on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from paceline.cli.process_tree import PROC, process_and_descendants


def available() -> list[int]:
    """The cores this process may use; empty on systems without this information."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores_by_target(cores: Sequence[int], targets: int, threads: int) -> list[tuple[int, ...]]:
    """`threads` cores for each target; () for each if that would leave no core for other processes."""
    if targets * threads >= len(cores):
        return [()] * targets
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(targets)]


def move_off_cores(taken: Sequence[int]) -> None:
    """Keep this process, and all that it started and will start, off these cores, if there are others.

    A process that is bound to fewer cores already, as a target is to its own, stays there.
    """
    everywhere = set(available())
    left = everywhere - set(taken)
    if not left or left == everywhere:
        return
    for process in process_and_descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(process) == everywhere:
                _bind(process, left)


@contextmanager
def affinity_restored() -> Iterator[None]:
    """Restore this process's cores at the end, which `move_off_cores` may have changed."""
    before = available()
    try:
        yield
    finally:
        if before != available():
            _bind(os.getpid(), before)


def _bind(process: int, cores: Collection[int]) -> None:
    """Bind all threads of a process. Raises OSError if it has ended."""
    for thread in list((PROC / str(process) / "task").iterdir()):
        with suppress(ProcessLookupError):  # this thread has ended
            os.sched_setaffinity(int(thread.name), cores)
