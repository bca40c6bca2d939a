"""Python's garbage collector, in a process that loads much at first and then works through many small things."""

from __future__ import annotations

import gc

GEN0_THRESHOLD = 50_000
"""So many more objects were made than freed before the youngest are looked at; Python's own number is 700."""


def freeze_gc_heap() -> None:
    """What is loaded by now stays, so nobody needs to look at it again; and steps that hold thousands of requests make
    thousands of objects that are freed without the collector's help."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GEN0_THRESHOLD)
