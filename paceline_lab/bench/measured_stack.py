"""A running deployment to measure, and the memory and CPU time that its processes use, from /proc."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console

from paceline.cli.deployment import Deployment
from paceline.cli.local_stack import LocalStack, running_stack
from paceline.cli.process_tree import PROC, process_and_descendants

LAST_LINES = 40


@asynccontextmanager
async def ready_stack(deployment: Deployment, console: Console) -> AsyncIterator[LocalStack]:
    """A stack to measure: ready, and silent. After an error, the last lines of its log go to stderr.

    `console` shows which services are still loading. Raises `StartError` or `StateError`.
    """
    lines: deque[str] = deque(maxlen=LAST_LINES)
    try:
        async with running_stack(deployment, lines.append) as stack:
            with console.status("starting") as status:
                await stack.ready(lambda missing: status.update(f"loading: {', '.join(missing)}"))
            yield stack
    except Exception:
        Console(stderr=True, highlight=False, markup=False).print(*lines, sep="\n")
        raise


def tree_pss_mb(root: int | None = None) -> float | None:
    """Proportional set size of a process, or this one, and all its descendants, in MB (10^6 bytes); None outside Linux.

    A page that several processes share counts once in all, unlike in the sum of their resident sizes.
    """
    if not (PROC / "self" / "smaps_rollup").exists():
        return None
    return sum(map(_pss_kib, process_and_descendants(root or os.getpid()))) * 1024 / 1e6


def cpu_s(process: int) -> float:
    """Seconds of CPU time that a process has used, with all its threads; 0 once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        after_name = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _pss_kib(process: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
