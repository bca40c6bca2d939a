"""Starting programs that end with their parent process, and the exit code of a program that cannot start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

COULD_NOT_START = 2
"""Exit code of a service that cannot start with its configuration: starting it again does not help."""


class StartError(Exception):
    """A program cannot start; the text says what to do."""


# Linux only: the kernel kills the program with its parent. Set between fork and exec in a fresh interpreter, since code
# in a forked child of a threaded program may hang.
_RUN_AND_DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended already")
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """Return a command that runs `argv`, whose first entry is an absolute path, and ends with this process at the
    latest.

    The kernel watches the thread that starts the command, so start it from a thread that lives as long as the process.
    """
    return [sys.executable, "-I", "-S", "-c", _RUN_AND_DIE_WITH_PARENT, str(os.getpid()), *argv]
