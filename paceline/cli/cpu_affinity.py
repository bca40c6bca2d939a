"""Which CPU cores compute and which do everything else, where one machine runs a whole deployment.

A target's step is one long computation. Whoever takes its core away for half a millisecond, a gateway that streams or
a draft that grows, delays every token; so each target gets cores of its own, as vLLM binds its threads on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from paceline.cli.process_tree import PROC, process_and_descendants


def available() -> list[int]:
    """The cores this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores_by_target(cores: Sequence[int], targets: int, threads: int) -> list[tuple[int, ...]]:
    """`threads` cores for each target. Nobody is bound, so all get (), if that would leave none for the rest."""
    if targets * threads >= len(cores):
        return [()] * targets
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(targets)]


def move_off_cores(taken: Sequence[int]) -> None:
    """Keep this process, and all it started and will start, off these cores, if there are others.

    Whoever is bound to cores already stays there: those whose cores these are.
    """
    everywhere = set(available())
    left = everywhere - set(taken)
    if not left or left == everywhere:
        return
    for process in process_and_descendants(os.getpid()):
        with suppress(OSError):  # it ended meanwhile
            if os.sched_getaffinity(process) == everywhere:
                _bind(process, left)


@contextmanager
def affinity_restored() -> Iterator[None]:
    """Give this process its cores back in the end, should `move_off_cores` take some meanwhile."""
    before = available()
    try:
        yield
    finally:
        if before != available():
            _bind(os.getpid(), before)


def _bind(process: int, cores: Collection[int]) -> None:
    """All threads of a process. Raises OSError if it has ended."""
    for thread in list((PROC / str(process) / "task").iterdir()):
        with suppress(ProcessLookupError):  # this thread ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
