"""Memory and CPU time of a stack and its clients, while they run."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline.cli.process_tree import process_and_descendants
from paceline_lab.bench.measured_stack import cpu_s, tree_pss_mb

EVERY_S = 3.0
MINUTE_S = 60.0


@dataclass(slots=True)
class ResourceWatch:
    """Samples of memory and CPU time. `roots`: process ids by name; each includes its descendants. Memory is that of
    this process and all its descendants."""

    roots: Mapping[str, int]
    memory_mb: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(EVERY_S)

    def _sample(self) -> None:
        now = time.time()
        if (memory := tree_pss_mb()) is not None:
            self.memory_mb.append((now, memory))
        self.cpu.append((now, _cpu_by_name(self.roots)))


def _cpu_by_name(roots: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of each root under its name, and of its descendants under `NAME compute`."""
    used: defaultdict[str, float] = defaultdict(float)
    for name, root in roots.items():
        for process in process_and_descendants(root):
            used[name if process == root else f"{name} compute"] += cpu_s(process)
    return dict(used)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Means over the first and last minute of a window, or its halves. `growth`: last over first, less 1."""

    first_minute_mb: float
    last_minute_mb: float
    growth: float


def memory(samples: Sequence[tuple[float, float]], begins: float, ends: float) -> MemoryUse | None:
    """None without samples."""
    part = min(MINUTE_S, (ends - begins) / 2)
    first = [mb for when, mb in samples if begins <= when < begins + part]
    last = [mb for when, mb in samples if ends - part <= when < ends]
    if not first or not last:
        return None
    return MemoryUse(round(fmean(first), 1), round(fmean(last), 1), round(fmean(last) / fmean(first) - 1, 4))


def cores(samples: Sequence[tuple[float, Mapping[str, float]]], begins: float, ends: float) -> dict[str, float]:
    """Mean number of CPU cores in use by name, the busiest first. A single thread near 1 is saturated."""
    within = [sample for sample in samples if begins <= sample[0] < ends]
    if len(within) < 2:
        return {}
    (start, before), (end, after) = within[0], within[-1]
    used = {name: round((after[name] - before.get(name, 0.0)) / (end - start), 2) for name in after}
    return dict(sorted(used.items(), key=lambda item: -item[1]))
