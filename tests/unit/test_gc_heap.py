"""`freeze_gc_heap` in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.ipc import gc_heap

COUNT = """
import gc
from paceline.ipc.gc_heap import freeze_gc_heap

{first}
ran = []
gc.callbacks.append(lambda phase, info: ran.append(phase))
kept = [[] for _ in range({objects})]
print(len(ran), gc.get_freeze_count())
"""


@pytest.mark.parametrize(("first", "collects", "freezes"), [("", True, False), ("freeze_gc_heap()", False, True)])
def test_the_objects_of_a_step_cause_no_collection(first: str, collects: bool, freezes: bool) -> None:
    program = COUNT.format(first=first, objects=gc_heap.GEN0_THRESHOLD // 2)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    ran, frozen = map(int, done.stdout.split())
    assert (ran > 0, frozen > 0) == (collects, freezes)
