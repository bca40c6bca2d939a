"""A running `paceline serve` in a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

PACELINE = (sys.executable, "-c", "from paceline.cli import main; main()")


class Served:
    """A running `paceline serve` with its own Redis."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*PACELINE, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.log: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the log up to a line in which `pattern` is found."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} was never logged:\n{''.join(self.log)}")

    def children(self, kind: str) -> dict[str, int]:
        """Process ids of its services of a kind, by command line."""
        out = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        lines = (line.strip().split(maxsplit=1) for line in out.stdout.splitlines())
        return {arguments: int(pid) for pid, arguments in lines if kind in arguments}


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    served = Served(*arguments)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.communicate()
