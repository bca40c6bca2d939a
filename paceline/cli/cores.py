"""Which CPU cores compute and which do everything else, where one machine runs a whole deployment.

A target's step is one long computation. Whoever takes its core away for half a millisecond, a gateway that streams or
a draft that grows, delays every token; so each target gets cores of its own, as vLLM binds its threads on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def available() -> list[int]:
    """The cores this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def share_out(cores: Sequence[int], targets: int, threads: int) -> list[tuple[int, ...]]:
    """`threads` cores for each target. Nobody is bound, so all get (), if that would leave none for the rest."""
    if targets * threads >= len(cores):
        return [()] * targets
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(targets)]


@contextmanager
def kept_free(taken: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and every process that it starts, off these cores, if there are others."""
    before = available()
    left = set(before) - set(taken)
    if not left or not taken:
        yield
        return
    os.sched_setaffinity(0, left)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
