"""Starts programs that end when whoever started them does, however that one ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Linux only: the kernel kills the program with the process that started it. Set between fork and exec in a fresh
# interpreter, since code in a forked child of a threaded program may hang.
_RUN_AND_DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: nobody is left who could ask twice
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone already")
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv`, which begins with an absolute path, for as long as this process lives at most.

    To the kernel it is the thread that lives: start it from one that stays.
    """
    return [sys.executable, "-I", "-S", "-c", _RUN_AND_DIE_WITH_PARENT, str(os.getpid()), *argv]
