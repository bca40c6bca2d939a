"""Starting programs: exit code of one that cannot start, wait before the next start, end with the parent process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

COULD_NOT_START = 2
"""Exit code of a service that cannot start with its configuration: starting it again does not help."""

FAILED = 1
"""Exit code of a service that failed while it served: starting it again may help."""


KILL_DRAFT = b"kill draft\n"
"""What a gateway in demo mode writes to its launcher's socket. The reply is a line: a draft worker's id, or nothing."""


class StartError(Exception):
    """A program cannot start; the text says what to do."""


@dataclass(slots=True)
class Backoff:
    """The wait before a program is started again. It doubles until the program has stayed up for `healthy_s`."""

    shortest_s: float = 0.2
    longest_s: float = 10.0
    healthy_s: float = 30.0
    _next_s: float = 0.0

    def after(self, lived_s: float) -> float:
        """Seconds to wait after the program ran for `lived_s` seconds."""
        wait_s = self.shortest_s if lived_s >= self.healthy_s else max(self._next_s, self.shortest_s)
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s


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
