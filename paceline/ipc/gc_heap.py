"""Garbage collection in a process that loads a model once and then handles many small objects per step."""

from __future__ import annotations

import gc

GEN0_THRESHOLD = 50_000
"""Net new objects before the youngest generation is collected; Python's default is 700."""


def freeze_gc_heap() -> None:
    """Exempt everything allocated so far from collection, and raise the threshold of generation 0.

    A step over thousands of requests allocates thousands of objects that reference counting frees by itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GEN0_THRESHOLD)
