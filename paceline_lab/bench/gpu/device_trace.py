"""What a device did while something ran, by torch's profiler."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from paceline_lab.bench.gpu.device_times import wait_for

Span = tuple[float, float]
"""Start and end, in microseconds."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls of CUDA that wait for the GPU."""
LISTED_KERNELS = 25


@dataclass(slots=True)
class DeviceTrace:
    """Times in microseconds."""

    us: float = 0.0
    """From the start to when the device has finished."""
    kernels: list[tuple[str, Span]] = field(default_factory=list)
    """By name, copies among them; empty on a CPU."""
    waits: list[Span] = field(default_factory=list)
    parts: list[Span] = field(default_factory=list)
    """When the calls ran that `marked_calls` marks."""
    part_kernels_us: float = 0.0
    """Of the kernels that these calls started."""

    @property
    def busy_us(self) -> float:
        """How long at least one kernel ran."""
        return covered(span for _, span in self.kernels)

    def table(self) -> list[dict[str, Any]]:
        """The kernels that take the longest in all."""
        counts, sums = Counter(name for name, _ in self.kernels), defaultdict[str, float](float)
        for name, (start, end) in self.kernels:
            sums[name] += end - start
        longest = sorted(sums, key=lambda name: -sums[name])[:LISTED_KERNELS]
        return [{"kernel": name[:120], "calls": counts[name], "us": round(sums[name], 1)} for name in longest]

    def part_figures(self) -> dict[str, float]:
        """Milliseconds of one marked call: on the host, waiting in it, and of its kernels on the device."""
        waits = sum(end - start for start, end in self.waits if _inside((start, end), self.parts))
        sums = {"host": sum(end - start for start, end in self.parts), "waits": waits, "device": self.part_kernels_us}
        return {name: round(1e-3 * us / max(1, len(self.parts)), 4) for name, us in sums.items()} | {
            "calls": len(self.parts)
        }


PART = "paceline part"


@contextmanager
def marked_calls(owner: Any, method: str) -> Iterator[None]:
    """While the context lasts, calls of `owner.method` are the parts of a trace."""
    call = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(PART):
            return call(*args, **kwargs)

    setattr(owner, method, marked)
    try:
        yield
    finally:
        setattr(owner, method, call)


def traced(work: Callable[[], object], device: torch.device, *, host: bool = False) -> DeviceTrace:
    """Run `work` and wait for the device. `host`: trace calls, too, which slows them down."""
    on_gpu = device.type == "cuda"
    gpu, cpu = [ProfilerActivity.CUDA] * on_gpu, [ProfilerActivity.CPU] * (host or not on_gpu)
    wait_for(device)
    with profile(activities=[*gpu, *cpu]) as profiler:
        began = time.perf_counter()
        work()
        wait_for(device)
        seconds = time.perf_counter() - began
    trace = _trace_of(profiler.events())
    trace.us = 1e6 * seconds
    return trace


def _trace_of(events: Iterable[Any]) -> DeviceTrace:
    """`events`: the profiler's."""
    trace = DeviceTrace()
    for event in events:
        span = (float(event.time_range.start), float(event.time_range.end))
        if event.device_type == DeviceType.CUDA:
            if not event.is_user_annotation:
                trace.kernels.append((event.name, span))
        elif event.name in WAITS:
            trace.waits.append(span)
        elif event.name == PART:
            trace.parts.append(span)
            trace.part_kernels_us += float(event.device_time_total)
    return trace


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _inside(span: Span, outer: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in outer)
